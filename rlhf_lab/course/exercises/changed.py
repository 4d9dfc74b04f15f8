"""Lesson 09, what RLHF changed: weights, logit shifts, grafts, truncated deltas."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.diffing.logit_shift import ModelEnd, split_shift
from rlhf_lab.diffing.weights import graft, truncate_delta
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.logit_shift import SITES, attribute_logits
from rlhf_lab.probes.weight_delta import describe_spectrum, unchanged_fraction
from rlhf_lab.training.capture import capture_activations


def _weight_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    before = weights(5, 4)
    some = torch.where(weights(5, 4) > 0, before + 1, before)
    mixed = torch.where(weights(5, 4) > 0, before * (1 + 1e-3), before)
    return (
        Case("some changed", {"before": before, "after": some}),
        Case("all changed a little", {"before": before, "after": before * (1 + 1e-3)}),
        Case("all changed by 1e-7", {"before": before, "after": before * (1 + 2e-7)}),
        Case("some changed a little", {"before": before, "after": mixed}),
        Case("nothing changed", {"before": before, "after": before.clone()}),
        Case("a vector", {"before": before[0], "after": some[0]}),
        Case("large numbers", {"before": 1e6 * before, "after": 1e6 * mixed}),
    )


def _spectrum_cases() -> tuple[Case, ...]:
    spectra = {
        "falling": [4.0, 3.0, 2.0, 1.0],
        "one direction": [3.0, 0.0, 0.0],
        "all equal": [2.0] * 10,
        "a long tail": [2.0, *[0.5] * 12],
        "a single number": [0.5],
        "nothing changed": [0.0, 0.0, 0.0],
        "large numbers": [1e6, 9e5, 2e5, 1e3],
    }
    return tuple(
        Case(name, {"s": torch.tensor(numbers, dtype=torch.float64)})
        for name, numbers in spectra.items()
    )


def _observe_spectrum(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    stable_rank, k90 = fn(**arguments)
    return {"stable rank": torch.tensor(float(stable_rank)), "directions": torch.tensor(int(k90))}


def _attribution_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, batch: int, seq: int, word: int, **more: str) -> Case:
        tokens = torch.randint(TOY_VOCABULARY, (batch, seq), generator=generator)
        return Case(label, {"tokens": tokens, "word": word, "other": 3} | more)

    return (
        case("ordinary", 3, 5, 7),
        case("other words", 4, 6, 10),
        case("batch of 1", 1, 5, 7),
        case("one token", 3, 1, 7),
        case("RMSNorm", 3, 5, 7, normalization_type="RMS"),
        case("logits that a hook has changed", 3, 5, 7, hook="word number w has its number added"),
    )


def _observe_attribution(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    model = toy_transformer(normalization_type=arguments.get("normalization_type", "LN"))
    acts = capture_activations(model, arguments["tokens"], SITES, pos=-1)
    if "hook" in arguments:  # rows do not sum to these logits, and a proof has to say so
        acts["logits"] = acts["logits"] + torch.arange(TOY_VOCABULARY)
    found = fn(model, acts, arguments["word"], arguments["other"])
    return {
        "components": list(found.components),
        "rows": found.rows.float(),
        "logit_difference": found.logit_difference.float(),
    }


def _drawn(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def _model_end(seed: int, components: int = 4, batch: int = 3, d_model: int = 5) -> ModelEnd:
    draw = _drawn(seed)
    parts = draw(components, batch, d_model)
    fed = parts + draw(components, batch, d_model)
    return ModelEnd(parts, fed, 0.5 + draw(batch).abs(), draw(d_model), draw(2))


def _shift_cases() -> tuple[Case, ...]:
    before, after = _model_end(0), _model_end(1)
    given = {"before": before, "after": after}
    sizes = {"components": 6, "batch": 1, "d_model": 7}
    read = before._replace(reader=after.reader, constants=after.constants)
    scaled = before._replace(inverse_scale=after.inverse_scale)
    return (
        Case("LayerNorm", given | {"centered": True}),
        Case("RMSNorm", given | {"centered": False}),
        Case(
            "one row, other sizes",
            {"before": _model_end(2, **sizes), "after": _model_end(3, **sizes), "centered": True},
        ),
        Case("only the unembedding changed", {"before": before, "after": read, "centered": True}),
        Case("only the scale changed", {"before": before, "after": scaled, "centered": True}),
        Case("nothing changed", {"before": before, "after": before, "centered": True}),
    )


def _observe_shift(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    causes = fn(**arguments)
    return {name: getattr(causes, name).float() for name in causes._fields}


def _graft_cases() -> tuple[Case, ...]:
    names = {
        "the unembedding": "unembed",
        "an MLP": "mlp.",
        "one matrix": "blocks.0.attn.W_O",
        "everything": "",
        "a base with a hook": "ln_final",
        "no name belongs": "no such weight",
    }
    return tuple(Case(label, {"belongs": part}) for label, part in names.items())


def _observe_graft(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    base, tuned = toy_transformer(0), toy_transformer(1)
    if arguments["belongs"] == "ln_final":
        base.add_perma_hook("hook_embed", lambda activation, hook: 2 * activation)
    weights = [_get_weights(model) for model in (base, tuned)]
    try:
        made = fn(base, tuned, lambda name: arguments["belongs"] in name)
    except ConfigError:
        return {"the result": "a ConfigError"}
    if not isinstance(made, HookedModel):
        return {"the result": f"a {type(made).__name__}"}
    origins = {name: _origin(name, w, *weights) for name, w in made.named_parameters()}
    data = {w.data_ptr() for w in made.parameters()}
    given = {w.data_ptr() for model in (base, tuned) for w in model.parameters()}
    kept = [
        _same(each, _get_weights(model)) for each, model in zip(weights, (base, tuned), strict=True)
    ]
    return {
        "the result": "a HookedTransformer",
        "weights from the tuned model": [n for n, where in origins.items() if where == "tuned"],
        "weights from neither": [n for n, where in origins.items() if where == "neither"],
        "the base is as it was": kept[0],
        "the tuned model is as it was": kept[1],
        "it shares weights with one of them": bool(data & given),
        "it has hooks": has_hooks(made),
        "its weights can be trained": any(w.requires_grad for w in made.parameters()),
    }


def _get_weights(model: HookedModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def _origin(
    name: str, weight: Tensor, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]
) -> str:
    if torch.equal(weight, tuned[name]):
        return "tuned"
    return "base" if torch.equal(weight, base[name]) else "neither"


def _delta_cases() -> tuple[Case, ...]:
    draw = _drawn(0)

    def case(label: str, rows: int, cols: int, rank: int, dtype: torch.dtype | None = None) -> Case:
        before = 3 * draw(rows, cols)
        after = before + draw(rows, cols)
        kind = dtype or torch.float32
        return Case(label, {"before": before.to(kind), "after": after.to(kind), "rank": rank})

    return (
        case("tall, rank 2", 6, 4, 2),
        case("wide, rank 1", 3, 7, 1),
        case("square, rank 3", 5, 5, 3),
        case("rank 0", 4, 3, 0),
        case("full rank", 4, 3, 3),
        case("a rank above the full one", 4, 3, 9),
        case("float64", 4, 5, 2, torch.float64),
        case("rank below 0", 4, 3, -1),
    )


def _observe_delta(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return fn(**arguments)
    except ConfigError:
        return {"this rank": "raises ConfigError"}


EXERCISES = (
    make_exercise(unchanged_fraction, cases=_weight_cases),
    make_exercise(describe_spectrum, cases=_spectrum_cases, observe=_observe_spectrum),
    make_exercise(attribute_logits, cases=_attribution_cases, observe=_observe_attribution),
    make_exercise(split_shift, cases=_shift_cases, observe=_observe_shift),
    make_exercise(graft, cases=_graft_cases, observe=_observe_graft),
    make_exercise(truncate_delta, cases=_delta_cases, observe=_observe_delta),
)
