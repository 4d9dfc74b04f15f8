"""Lesson 04, the KL penalty: KL divergence, its estimates, the optimal policy and its KL budget."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import filtered, half_precision, standard_cases, with_log_probs
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.functional import calc_kl_penalty, kl_estimate, kl_per_token, tilt
from rlhf_lab.organism import best_at_budget, mean_backup, soft_backup


def _estimate_cases() -> tuple[Case, ...]:
    cases = []
    for kind in ("k1", "k2", "k3"):
        spoil = ("logprobs", "ref_logprobs")
        cases.extend(standard_cases(kl_estimate, large={"logprobs": 10.0}, spoil=spoil, kind=kind))
    return (*cases, half_precision(kl_estimate, "logprobs", "ref_logprobs", kind="k1"))


def _tilt_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, *shape: int, beta: float = 0.5, scale: float = 1.0) -> Case:
        chances = torch.rand(shape, generator=generator)
        rewards = scale * torch.randn(shape, generator=generator)
        chances = chances / chances.sum(-1, keepdim=True)
        return Case(label, {"chances": chances, "rewards": rewards, "beta": beta})

    impossible = case("an impossible outcome with the highest reward", 4)
    chances, rewards = (impossible.arguments[name].clone() for name in ("chances", "rewards"))
    chances[2], rewards[2] = 0.0, torch.inf
    return (
        case("four outcomes", 4),
        case("a dear nat", 5, beta=3.0),
        case("several rows", 3, 4),
        case("rewards a thousand times the price", 4, beta=1e-3, scale=2.0),
        case("one outcome", 1),
        Case(
            impossible.label,
            {"chances": chances / chances.sum(), "rewards": rewards, "beta": 0.5},
        ),
        Case(
            "half precision",
            {
                "chances": torch.tensor([0.25, 0.75]).half(),
                "rewards": torch.tensor([1.0, 0.5]).half(),
                "beta": 0.5,
            },
        ),
    )


def _backup_cases(**given: float) -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(1)

    def case(label: str, states: int, vocab: int, after: int, scale: float = 1.0) -> Case:
        probability = torch.rand(states, vocab, generator=generator, dtype=torch.float64)
        probability[:, -1] = 0.0  # a word that cannot come next
        later = scale * torch.randn(after, generator=generator, dtype=torch.float64)
        successor = torch.randint(after, (states, vocab), generator=generator)
        return Case(
            label,
            {
                "later": later,
                "probability": probability / probability.sum(-1, keepdim=True),
                "successor": successor,
                **given,
            },
        )

    unreachable = case("a word that cannot come would lead to great riches", 2, 4, 3).arguments
    later = unreachable["later"].clone()
    later[2] = 1e4
    successor = unreachable["successor"].clamp(max=1)
    successor[:, -1] = 2
    return (
        case("three states, four words", 3, 5, 4),
        case("one state", 1, 4, 6),
        case("values far from 0", 3, 5, 4, scale=2e3),
        Case(
            "a word that cannot come would lead to great riches",
            unreachable | {"later": later, "successor": successor},
        ),
    )


def _observe_backup(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    value, policy = fn(**arguments)
    return {"values": value, "policy": policy}


def _two_outcomes(reward: float) -> Callable[[float], tuple[float, float]]:
    def solve(beta: float) -> tuple[float, float]:
        chances = torch.tensor([0.5, 0.5], dtype=torch.float64)
        best = tilt(chances, torch.tensor([0.0, reward], dtype=torch.float64), beta)
        kl = (torch.special.xlogy(best, best) - torch.special.xlogy(best, chances)).sum()
        return float(reward * best[1]), float(kl)

    return solve


def _budget_cases() -> tuple[Case, ...]:
    return (
        Case("a fair coin", {"solve": _two_outcomes(1.0), "kl": 0.1}),
        Case("a budget near the largest KL", {"solve": _two_outcomes(1.0), "kl": 0.69}),
        Case("a small budget", {"solve": _two_outcomes(3.0), "kl": 1e-4}),
        Case("a budget that no beta has", {"solve": _two_outcomes(1.0), "kl": 5.0}),
    )


def _observe_budget(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments["kl"] > 1:
        try:
            fn(**arguments)
        except ValueError:
            return {"a budget that no beta has raises ValueError": True}
        return {"a budget that no beta has raises ValueError": False}
    beta = fn(**arguments)
    return {
        "log of beta": torch.tensor(float(beta)).log(),
        "KL at that beta": torch.tensor(arguments["solve"](float(beta))[1]),
    }


EXERCISES = (
    make_exercise(
        kl_per_token,
        cases=lambda: with_log_probs(
            (
                *standard_cases(kl_per_token, large={"logprobs": 1e3, "ref_logprobs": 1e3}),
                filtered(kl_per_token, "logprobs"),
                filtered(kl_per_token, "logprobs", "ref_logprobs"),
                filtered(kl_per_token, "ref_logprobs"),
            )
        ),
    ),
    make_exercise(
        calc_kl_penalty,
        cases=lambda: standard_cases(
            calc_kl_penalty, large={"kl": 1e3}, spoil=("kl",), kl_coef=0.7
        ),
    ),
    make_exercise(kl_estimate, cases=_estimate_cases),
    make_exercise(tilt, cases=_tilt_cases),
    make_exercise(soft_backup, cases=_backup_cases, observe=_observe_backup),
    make_exercise(mean_backup, cases=lambda: _backup_cases(beta=0.4), observe=_observe_backup),
    make_exercise(best_at_budget, cases=_budget_cases, observe=_observe_budget),
)
