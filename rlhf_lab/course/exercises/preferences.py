"""Lesson 10, preferences: a rater, Bradley-Terry, calibration, best-of-n, DPO and LoRA."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.functional import (
    best_of_n_weights,
    bradley_terry_loss,
    calibration_bins,
    dpo_loss,
    implicit_rewards,
    sample_preferences,
)
from rlhf_lab.models.lora import LoRALinear


def _rater_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, pairs: int, scale: float = 2.0, **given: float) -> Case:
        gaps = scale * torch.randn(pairs, generator=generator)
        uniforms = torch.rand(pairs, generator=generator)
        return Case(label, {"gaps": gaps, "uniforms": uniforms, **given})

    return (
        case("200 pairs", 200),
        case("a hesitant rater", 200, temperature=3.0),
        case("a fifth of the labels flipped", 400, flip_rate=0.2),
        case("both", 400, temperature=0.5, flip_rate=0.3),
        case("all labels flipped", 200, flip_rate=1.0),
        case("gaps of thousands", 100, scale=1e4, flip_rate=0.1),
        case("one pair", 1),
    )


def _bradley_terry_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(1)

    def case(label: str, pairs: int, scale: float = 1.0, **given: Any) -> Case:
        chosen, rejected = scale * torch.randn(2, pairs, generator=generator)
        return Case(label, {"chosen": chosen + 1, "rejected": rejected + 2, **given})

    halves = case("half precision", 4).arguments
    return (
        case("six pairs", 6),
        case("one pair", 1),
        case("with a margin", 5, margin=0.7),
        case("a margin for each pair", 3, margin=torch.tensor([0.0, 1.0, 2.5])),
        case("with centring", 5, center_coef=0.1),
        case("with both", 5, margin=0.5, center_coef=0.3),
        case("far apart", 4, scale=1e3),
        Case("half precision", {name: x.half() for name, x in halves.items()}),
    )


def _calibration_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(2)

    def case(label: str, pairs: int, n_bins: int, scale: float = 2.0) -> Case:
        gaps = scale * torch.randn(pairs, generator=generator)
        outcomes = torch.rand(pairs, generator=generator) < (gaps / 2).sigmoid()
        return Case(label, {"gaps": gaps, "outcomes": outcomes, "n_bins": n_bins})

    return (
        case("60 pairs, 5 bins", 60, 5),
        case("a number that does not divide", 17, 4),
        case("one bin", 9, 1),
        case("a sure judge", 40, 4, scale=8.0),
        case("as many bins as pairs", 5, 5),
    )


def _observe_calibration(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    found = fn(**arguments)
    if not isinstance(found, tuple) or len(found) != 3:
        return found
    columns = dict(zip(("predicted", "observed", "count"), found, strict=True))
    if isinstance(columns["count"], Tensor):
        columns["count"] = columns["count"].double()
    return columns


def _best_of_n_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(3)

    def case(label: str, rows: int, samples: int, n: int) -> Case:
        return Case(label, {"rewards": torch.randn(rows, samples, generator=generator), "n": n})

    ties = torch.tensor([[1.0, 0.0, 1.0, 0.0, 2.0, 0.0], [3.0] * 6])
    return (
        case("the best of 2 of 5", 1, 5, 2),
        case("two rows", 2, 6, 3),
        case("the best of 1", 2, 4, 1),
        case("all of them", 1, 5, 5),
        Case("equal rewards", {"rewards": ties, "n": 3}),
        case("512 of 4,000", 1, 4000, 512),
        case("one sample", 1, 1, 1),
    )


def _observe_best_of_n(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    found = fn(**arguments)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return found
    # the smallest weights are far below what is compared
    return {
        "weights": found.double(),
        "largest weights, times the number of samples": found.double().amax(-1) * found.shape[-1],
        "sum of each row": found.double().sum(-1),
    }


def _dpo_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(4)
    names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")

    def case(label: str, pairs: int, beta: float, away: float = 3.0, **given: Any) -> Case:
        sides = -30 - away * torch.rand(4, pairs, generator=generator)
        return Case(label, {**dict(zip(names, sides, strict=True)), "beta": beta, **given})

    halves = case("half precision", 3, 0.7).arguments
    return (
        case("five pairs", 5, 0.5),
        case("one pair", 1, 2.0),
        case("labels that may be wrong", 5, 0.5, label_smoothing=0.2),
        case("far from the reference", 4, 1.0, away=2e3),
        case("IPO", 5, 0.4, kind="ipo"),
        Case(
            "half precision",
            {name: x.half() if isinstance(x, Tensor) else x for name, x in halves.items()},
        ),
    )


def _implicit_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(5)

    def case(label: str, texts: int, beta: float, away: float = 3.0) -> Case:
        policy, ref = -30 - away * torch.rand(2, texts, generator=generator)
        return Case(label, {"policy": policy, "ref": ref, "beta": beta})

    halves = case("half precision", 3, 0.7).arguments
    return (
        case("five texts", 5, 0.5),
        case("one text", 1, 4.0),
        case("log-probabilities of thousands", 3, 0.1, away=4e3),
        Case("half precision", halves | {name: halves[name].half() for name in ("policy", "ref")}),
    )


def _lora_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(6)

    def case(label: str, *shape: int, rank: int = 2, alpha: float = 6.0, by_head: bool = False):
        weight = torch.randn(shape, generator=generator)
        given = {"rank": rank, "alpha": alpha, "inputs_by_head": by_head}
        return Case(label, {"weight": weight, **given})

    return (
        case("a matrix", 12, 5),
        case("a square matrix", 6, 6, rank=3),
        case("rank 1", 8, 4, rank=1, alpha=1.0),
        case("a weight by head", 2, 8, 3),
        case("inputs by head", 4, 3, 8, by_head=True),
    )


def _observe_lora(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    weight, settings = arguments["weight"], dict(arguments)
    before = weight.clone()
    settings["generator"] = torch.Generator().manual_seed(0)
    adapter = build(**settings)
    facts = {"A": adapter.A.detach().clone(), "B": adapter.B.detach().clone()}
    if facts["B"].shape[-1] != weight.shape[-1]:
        return facts
    if not facts["A"].any() and facts["B"].any():  # one mistake, whatever the noise is
        return facts | {"B": "not 0"}
    facts["the weight at first"] = adapter(weight.clone()).detach()
    noise = torch.randn(facts["B"].shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        adapter.B.copy_(noise)
    changed = adapter(weight)
    facts |= {
        "delta": adapter.delta().detach(),
        "the weight with its change": changed.detach(),
        "the weight itself afterwards": weight.clone(),
    }
    adapter.merged = before + 1
    facts["with merged there and gradients on"] = adapter(before.clone()).detach()
    with torch.no_grad():
        facts["with merged there and gradients off"] = adapter(before.clone())
    adapter.merged, adapter.enabled = None, False
    facts["the weight while off"] = adapter(before.clone()).detach()
    probe = torch.randn(changed.shape, generator=torch.Generator().manual_seed(2))
    (changed * probe).sum().backward()
    return facts | {
        "gradient of A": torch.zeros(1) if adapter.A.grad is None else adapter.A.grad,
        "gradient of B": torch.zeros(1) if adapter.B.grad is None else adapter.B.grad,
    }


EXERCISES = (
    make_exercise(sample_preferences, cases=_rater_cases),
    make_exercise(bradley_terry_loss, cases=_bradley_terry_cases),
    make_exercise(calibration_bins, cases=_calibration_cases, observe=_observe_calibration),
    make_exercise(best_of_n_weights, cases=_best_of_n_cases, observe=_observe_best_of_n),
    make_exercise(implicit_rewards, cases=_implicit_cases),
    make_exercise(dpo_loss, cases=_dpo_cases),
    make_exercise(LoRALinear, cases=_lora_cases, observe=_observe_lora),
)
