"""Exercises on preferences: a rater, Bradley-Terry, calibration, best-of-n, DPO and LoRA."""

from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.functional import (
    best_of_n_weights,
    bradley_terry_loss,
    calibration_bins,
    dpo_loss,
    implicit_rewards,
    sample_preferences,
)
from rlhf_lab.models.lora import LoRALinear


def _observe_calibration(fn: Answer, **arguments: Any) -> Any:
    found = fn(**arguments)
    if not isinstance(found, tuple) or len(found) != 3:
        return found
    columns = dict(zip(("predicted", "observed", "count"), found, strict=True))
    if isinstance(columns["count"], Tensor):
        columns["count"] = columns["count"].double()
    return columns


@exercise(calibration_bins, _observe_calibration)
def _calibration_cases() -> Cases:
    draws = Draws(2)

    def case(pairs: int, n_bins: int, scale: float = 2.0) -> Arguments:
        gaps = scale * draws.normal(pairs)
        outcomes = draws.uniform(pairs) < (gaps / 2).sigmoid()
        return {"gaps": gaps, "outcomes": outcomes, "n_bins": n_bins}

    return {
        "60 pairs, 5 bins": case(60, 5),
        "pairs that don't divide evenly into bins": case(17, 4),
        "one bin": case(9, 1),
        "a confident judge": case(40, 4, scale=8.0),
        "as many bins as pairs": case(5, 5),
    }


def _observe_best_of_n(fn: Answer, **arguments: Any) -> Any:
    found = fn(**arguments)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return found
    # the smallest weights are far below what is compared
    return {
        "weights": found.double(),
        "largest weights, times the number of samples": found.double().amax(-1) * found.shape[-1],
        "sum of each row": found.double().sum(-1),
    }


@exercise(best_of_n_weights, _observe_best_of_n)
def _best_of_n_cases() -> Cases:
    draws = Draws(3)
    case = lambda rows, samples, n: {"rewards": draws.normal(rows, samples), "n": n}
    ties = torch.tensor([[1.0, 0.0, 1.0, 0.0, 2.0, 0.0], [3.0] * 6])
    return {
        "the best of 2 of 5": case(1, 5, 2),
        "two rows": case(2, 6, 3),
        "the best of 1": case(2, 4, 1),
        "the best of all": case(1, 5, 5),
        "equal rewards": {"rewards": ties, "n": 3},
        "512 of 4,000": case(1, 4000, 512),
        "one sample": case(1, 1, 1),
    }


def _observe_lora(build: Answer, shape: list[int], **settings: Any) -> dict[str, Any]:
    weight = Draws(shape[0]).normal(*shape)
    before = weight.clone()
    adapter = build(weight=weight, generator=torch.Generator().manual_seed(0), **settings)
    facts = {"A": adapter.A.detach().clone(), "B": adapter.B.detach().clone()}
    if facts["B"].shape[-1] != weight.shape[-1]:
        return facts
    if not facts["A"].any() and facts["B"].any():  # one mistake, whatever the noise is
        return facts | {"B": "not 0"}
    facts["the initial weight"] = adapter(weight.clone()).detach()
    with torch.no_grad():
        adapter.B.copy_(Draws(1).normal(*adapter.B.shape))
    changed = adapter(weight)
    facts |= {
        "delta": adapter.delta().detach(),
        "the weight plus its change": changed.detach(),
        "the weight itself afterwards": weight.clone(),
    }
    adapter.merged = before + 1
    facts["with a merged weight, gradients on"] = adapter(before.clone()).detach()
    with torch.no_grad():
        facts["with a merged weight, gradients off"] = adapter(before.clone())
    adapter.merged, adapter.enabled = None, False
    facts["the weight while disabled"] = adapter(before.clone()).detach()
    (changed * Draws(2).normal(*changed.shape)).sum().backward()
    for name, factor in (("A", adapter.A), ("B", adapter.B)):
        facts[f"gradient of {name}"] = torch.zeros(1) if factor.grad is None else factor.grad
    return facts


_rater = make_exercise(sample_preferences)
_bradley_terry = make_exercise(bradley_terry_loss)
_dpo = make_exercise(dpo_loss)
_implicit = make_exercise(implicit_rewards)
_lora = make_exercise(LoRALinear, observe=_observe_lora)
