"""Exercises on the policy, and on what RLHF changed: sampling, heads, weights, logit shifts."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.course.exercises.claims import interval_facts
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, residual_cases, toy_transformer
from rlhf_lab.diffing import ablate_heads, logit_lens, patch_heads
from rlhf_lab.diffing.logit_shift import ModelEnd, split_shift
from rlhf_lab.diffing.weights import graft, truncate_delta
from rlhf_lab.functional import bootstrap_means, recovered_fraction
from rlhf_lab.models import has_hooks
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.logit_shift import SITES, attribute_logits
from rlhf_lab.probes.weight_delta import describe_spectrum, unchanged_fraction
from rlhf_lab.sampling import draw_token, sample_without_cache
from rlhf_lab.training.capture import capture_activations


@exercise(draw_token)
def _draw_cases() -> Cases:
    draws = Draws(0)

    def drawn(batch: int, width: int) -> Arguments:
        logits = 2 * draws.normal(batch, width)
        return {"logprobs": logits.log_softmax(-1), "noise": draws.uniform(batch)}

    def from_probs(probs: list[float], *noise: float) -> Arguments:
        logprobs = torch.tensor(probs).log().expand(len(noise), len(probs))
        return {"logprobs": logprobs, "noise": torch.tensor(noise)}

    probs = [0.1, 0.4, 0.3, 0.2]
    too_small = [0.9 * p for p in probs]
    return {
        "ordinary": drawn(6, 5),
        "other sizes": drawn(9, 12),
        "batch of 1": drawn(1, 5),
        "one distribution, several random numbers": from_probs(probs, 0.05, 0.3, 0.55, 0.95),
        "a token of probability 0 first, noise 0": from_probs([0.0, 0.5, 0.5], 0.0, 0.3, 0.7),
        "tokens of probability 0": from_probs([0.5, 0.0, 0.0, 0.5, 0.0], 0.2, 0.7, 0.999),
        "probabilities that add up to 0.9": from_probs(too_small, 0.09, 0.48, 0.79, 0.95),
    }


_sampling = make_exercise(
    sample_without_cache, observe=lambda fn, **kw: fn(toy_transformer(), **kw)
)


def _observe_lens(fn: Answer, residual: Tensor, norm: str = "LN", sharper: float = 1.0) -> Any:
    model = toy_transformer(normalization_type=norm)
    model.unembed.W_U.data *= sharper
    return fn(model.requires_grad_(False), residual)


@exercise(logit_lens, _observe_lens)
def _lens_cases() -> Cases:
    residual = Draws(0).normal(2, 2, 8) + 0.5
    return residual_cases() | {
        "large numbers": {"residual": 1e4 * residual},
        "a confident model": {"residual": residual, "sharper": 100.0},
    }


def _head_cases(*names: str, suffix: str = "", **given: Any) -> Cases:
    draws = Draws(0)
    cuts = {
        "several heads and positions": ((3, 6, 4, 2), [0, 2], slice(1, 4)),
        "one head, one position": ((4, 5, 3, 2), [1], slice(2, 3)),
        "up to the end": ((3, 4, 2, 3), [1], slice(2, None)),
        "the last position": ((3, 4, 2, 3), [0], slice(-1, None)),
        "batch of 1": ((1, 4, 3, 2), [2], slice(0, 2)),
    }
    return {
        label + suffix: {name: draws.normal(*shape) for name in names}
        | {"heads": heads, "positions": positions, **given}
        for label, (shape, heads, positions) in cuts.items()
    }


@exercise(ablate_heads)
def _ablate_cases() -> Cases:
    return _head_cases("z", to="zero") | _head_cases("z", to="mean", suffix=", mean")


def _observe_fraction(
    fn: Answer, clean: Tensor, corrupted: Tensor, patched: Tensor, level: float = 0.95
) -> dict[str, Any]:
    found = fn(clean, corrupted, patched, level=level, resamples=200)
    if found.value is None:
        return {"the fraction is defined": False}
    ratio = lambda clean, corrupted, patched: (patched - corrupted) / (clean - corrupted)
    expected = bootstrap_means(clean, corrupted, patched, statistic=ratio, level=level)
    return {"the fraction is defined": True} | interval_facts("the fraction", found, expected)


@exercise(recovered_fraction, _observe_fraction)
def _fraction_cases() -> Cases:
    draws = Draws(0)

    def case(fraction: float, n: int = 60, effect: float = 1.0, spread: float = 1.0) -> Arguments:
        corrupted, effects = draws.normal(n), effect * (1 + spread * draws.normal(n))
        patched = corrupted + fraction * effects + 0.2 * draws.normal(n)
        return {"clean": corrupted + effects, "corrupted": corrupted, "patched": patched}

    no_effect = dict(zip(("clean", "corrupted", "patched"), draws.normal(3, 50), strict=True))
    return {
        "partly recovered": case(0.6),
        "the effect is negative": case(0.4, effect=-1.5),
        "more than fully recovered": case(1.3, spread=0.5),
        "the opposite effect": case(-0.4, spread=0.5),
        "many sequences": case(0.6, n=400),
        "clean and corrupted differ only by chance": no_effect,
        "another level": case(0.6) | {"level": 0.5},
    }


_patch_heads = make_exercise(patch_heads, lambda: _head_cases("z", "donor"))


@exercise(unchanged_fraction)
def _weight_cases() -> Cases:
    draws = Draws(0)
    before = draws.normal(5, 4)
    some = torch.where(draws.normal(5, 4) > 0, before + 1, before)
    mixed = torch.where(draws.normal(5, 4) > 0, before * (1 + 1e-3), before)
    return {
        "some changed": {"before": before, "after": some},
        "all changed a little": {"before": before, "after": before * (1 + 1e-3)},
        "all changed by 1e-7": {"before": before, "after": before * (1 + 2e-7)},
        "some changed a little": {"before": before, "after": mixed},
        "nothing changed": {"before": before, "after": before.clone()},
        "a vector": {"before": before[0], "after": some[0]},
        "large numbers": {"before": 1e6 * before, "after": 1e6 * mixed},
    }


def _observe_attribution(
    fn: Answer, tokens: Tensor, word: int, other: int, norm: str = "LN", hook: str = ""
) -> dict[str, Any]:
    model = toy_transformer(normalization_type=norm)
    acts = capture_activations(model, tokens, SITES, pos=-1)
    if hook:  # rows do not sum to these logits, so the difference must not be their sum
        acts["logits"] = acts["logits"] + torch.arange(TOY_VOCABULARY)
    found = fn(model, acts, word, other)
    return {
        "components": list(found.components),
        "rows": found.rows.float(),
        "logit_difference": found.logit_difference.float(),
    }


@exercise(attribute_logits, _observe_attribution)
def _attribution_cases() -> Cases:
    def case(batch: int, seq: int, word: int, **more: Any) -> Arguments:
        tokens = Draws(word).integers(TOY_VOCABULARY, batch, seq)
        return {"tokens": tokens, "word": word, "other": 3} | more

    return {
        "ordinary": case(3, 5, 7),
        "other words": case(4, 6, 10),
        "batch of 1": case(1, 5, 7),
        "one token": case(3, 1, 7),
        "RMSNorm": case(3, 5, 7, norm="RMS"),
        "logits that a hook has changed": case(3, 5, 7, hook="word number w has its number added"),
    }


def _model_end(seed: int, components: int = 4, batch: int = 3, d_model: int = 5) -> ModelEnd:
    draws = Draws(seed, torch.float64)
    parts = draws.normal(components, batch, d_model)
    fed = parts + draws.normal(components, batch, d_model)
    scale = 0.5 + draws.normal(batch).abs()
    return ModelEnd(parts, fed, scale, draws.normal(d_model), draws.normal(2))


def _observe_shift(fn: Answer, **arguments: Any) -> dict[str, Any]:
    return {name: cause.float() for name, cause in fn(**arguments)._asdict().items()}


_describe_spectrum = make_exercise(describe_spectrum)


@exercise(split_shift, _observe_shift)
def _shift_cases() -> Cases:
    before, after = _model_end(0), _model_end(1)
    read = before._replace(reader=after.reader, constants=after.constants)
    scaled = before._replace(inverse_scale=after.inverse_scale)
    case = lambda one, other, centered=True: {"before": one, "after": other, "centered": centered}
    return {
        "LayerNorm": case(before, after),
        "RMSNorm": case(before, after, centered=False),
        "one row, other sizes": case(_model_end(2, 6, 1, 7), _model_end(3, 6, 1, 7)),
        "only the unembedding changed": case(before, read),
        "only the scale changed": case(before, scaled),
        "nothing changed": case(before, before),
    }


def _observe_graft(fn: Answer, belongs: str) -> dict[str, Any]:
    base, tuned = toy_transformer(0), toy_transformer(1)
    if belongs == "ln_final":
        base.add_perma_hook("hook_embed", lambda activation, hook: 2 * activation)
    weights = [copy.deepcopy(dict(model.named_parameters())) for model in (base, tuned)]
    made = fn(base, tuned, lambda name: belongs in name)
    data = {w.data_ptr() for w in made.parameters()}
    given = {w.data_ptr() for model in (base, tuned) for w in model.parameters()}
    origins = {n: [torch.equal(w, x[n]) for x in weights] for n, w in made.named_parameters()}
    return {
        "weights from the tuned model": [n for n, (_, of_tuned) in origins.items() if of_tuned],
        "weights from neither": [name for name, equal in origins.items() if not any(equal)],
        "the base is unchanged": _has_weights(base, weights[0]),
        "the tuned model is unchanged": _has_weights(tuned, weights[1]),
        "the graft shares weights with a model": bool(data & given),
        "the graft has hooks": has_hooks(made),
        "the graft's weights can be trained": any(w.requires_grad for w in made.parameters()),
    }


def _has_weights(model: HookedModel, weights: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(w, weights[name]) for name, w in model.named_parameters())


_delta = make_exercise(truncate_delta)


_graft = make_exercise(graft, observe=_observe_graft)
