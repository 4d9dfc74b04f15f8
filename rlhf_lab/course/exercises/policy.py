"""Exercises on sampling, log-probabilities, the logit lens, heads ablated and patched."""

from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, residual_cases, toy_transformer
from rlhf_lab.diffing import ablate_heads, logit_lens, patch_heads
from rlhf_lab.functional import bootstrap_means, get_logprobs, recovered_fraction
from rlhf_lab.sampling import draw_token, sample_without_cache


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


@exercise(sample_without_cache, lambda fn, **kw: fn(toy_transformer(), **kw))
def _sampling_cases() -> Cases:
    draws = Draws(0)

    def case(batch: int, prefix: int, gen: int, temperature: float) -> Arguments:
        prompts = draws.integers(TOY_VOCABULARY, batch, prefix)
        return {"prompts": prompts, "noise": draws.uniform(gen, batch), "temperature": temperature}

    return {
        "ordinary": case(4, 4, 6, 1.0),
        "cold": case(5, 3, 7, 0.5),
        "one step": case(6, 2, 1, 1.5),
        "a prompt of one token": case(4, 1, 6, 1.5),
        "nearly greedy": case(3, 4, 6, 0.01),
    }


_logprobs = make_exercise(get_logprobs)


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
    facts = {
        "the fraction is defined": True,
        "share": torch.as_tensor(found.value).double().reshape(()),
        "sequences": found.n,
        "there is an interval": found.low is not None,
    }
    ratio = lambda clean, corrupted, patched: (patched - corrupted) / (clean - corrupted)
    expected = bootstrap_means(clean, corrupted, patched, statistic=ratio, level=level)
    if found.low is None or expected.low is None:
        return facts
    width = expected.high - expected.low
    apart = (found.low + found.high - expected.low - expected.high).abs() / 2
    return facts | {
        "width of the interval": _in_words(float((found.high - found.low) / width)),
        "its middle agrees with a bootstrap": bool(apart <= 0.15 * width),
    }


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


def _in_words(width: float) -> str:
    if 0.85 <= width <= 1.18:
        return "as wide as a bootstrap's"
    if width < 0.85:
        return "too narrow" if width > 0.6 else "far too narrow"
    return "too wide" if width < 1.7 else "far too wide"


_patch_heads = make_exercise(patch_heads, lambda: _head_cases("z", "donor"))
