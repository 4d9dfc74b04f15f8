"""Lesson 09, what RLHF changed: shares of a shift, grafts and deltas of few directions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.diffing.logit_shift import ModelEnd, split_shift
from rlhf_lab.diffing.weights import graft, truncate_delta
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.models.hooked_model import HookedModel


def _drawn(seed: int) -> Callable[..., Tensor]:
    """Normal numbers of any shape, in float64."""
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
        Case("only the read-out changed", {"before": before, "after": read, "centered": True}),
        Case("only the scale changed", {"before": before, "after": scaled, "centered": True}),
        Case("nothing changed", {"before": before, "after": before, "centered": True}),
    )


def _observe_shift(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The four causes, row by row, in any precision."""
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
    """Where each weight of the graft is from, and that both models are left as they were."""
    base, tuned = toy_transformer(0), toy_transformer(1)
    if arguments["belongs"] == "ln_final":
        base.add_perma_hook("hook_embed", lambda activation, hook: 2 * activation)
    weights = [_weights_of(model) for model in (base, tuned)]
    try:
        made = fn(base, tuned, lambda name: arguments["belongs"] in name)
    except ConfigError:
        return {"the result": "refused with a ConfigError"}
    if not isinstance(made, HookedModel):
        return {"the result": f"a {type(made).__name__}"}
    origins = {name: _origin(name, w, *weights) for name, w in made.named_parameters()}
    own = {w.data_ptr() for w in made.parameters()}
    given = {w.data_ptr() for model in (base, tuned) for w in model.parameters()}
    kept = [
        _same(each, _weights_of(model)) for each, model in zip(weights, (base, tuned), strict=True)
    ]
    return {
        "the result": "a HookedTransformer",
        "weights from the tuned model": [n for n, where in origins.items() if where == "tuned"],
        "weights from neither": [n for n, where in origins.items() if where == "neither"],
        "the base is as it was": kept[0],
        "the tuned model is as it was": kept[1],
        "it shares weights with one of them": bool(own & given),
        "it has hooks": has_hooks(made),
        "its weights can be trained": any(w.requires_grad for w in made.parameters()),
    }


def _weights_of(model: HookedModel) -> dict[str, Tensor]:
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
        return {"this rank": "is refused"}


_exercise = exercise_from("diffing.toml")

EXERCISES = (
    _exercise(split_shift, cases=_shift_cases, observe=_observe_shift),
    _exercise(graft, cases=_graft_cases, observe=_observe_graft),
    _exercise(truncate_delta, cases=_delta_cases, observe=_observe_delta),
)
