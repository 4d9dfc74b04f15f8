"""Exercises on KL divergence, its estimates, the optimal policy and its KL budget."""

from collections.abc import Callable
from typing import Any

import torch

from rlhf_lab.course.cases import (
    Arguments,
    Cases,
    Draws,
    filtered,
    half_precision,
    standard_cases,
    with_log_probs,
)
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.functional import kl_estimate, kl_per_token, tilt
from rlhf_lab.organism import best_at_budget, mean_backup, soft_backup

Solve = Callable[[float], tuple[float, float]]


def _kl_cases() -> Cases:
    fn, names = kl_per_token, ("logprobs", "ref_logprobs")
    return with_log_probs(
        standard_cases(fn, large=dict.fromkeys(names, 1e3))
        | filtered(fn, "logprobs")
        | filtered(fn, *names)
        | filtered(fn, "ref_logprobs")
    )


def _estimate_cases() -> Cases:
    names, large, cases = ("logprobs", "ref_logprobs"), {"logprobs": 10.0}, {}
    for kind in ("k1", "k2", "k3"):
        given = {"spoil": names, "suffix": f", {kind}", "kind": kind}
        cases |= standard_cases(kl_estimate, large=large, **given)
    return cases | half_precision(kl_estimate, *names, kind="k1")


def _tilt_cases() -> Cases:
    draws = Draws(0)

    def case(*shape: int, beta: float = 0.5, scale: float = 1.0) -> Arguments:
        chances, rewards = draws.normal(*shape).softmax(-1), scale * draws.normal(*shape)
        return {"chances": chances, "rewards": rewards, "beta": beta}

    impossible = torch.tensor([0.2, 0.3, 0.0, 0.5]), torch.tensor([0.4, -1.0, torch.inf, 0.1])
    half = torch.tensor([0.25, 0.75]).half(), torch.tensor([1.0, 0.5]).half()
    pair = lambda tensors: dict(zip(("chances", "rewards"), tensors, strict=True))
    return {
        "four outcomes": case(4),
        "a large beta": case(5, beta=3.0),
        "several rows": case(3, 4),
        "rewards much larger than beta": case(4, beta=1e-3, scale=2.0),
        "one outcome": case(1),
        "an impossible outcome with the highest reward": pair(impossible) | {"beta": 0.5},
        "half precision": pair(half) | {"beta": 0.5},
    }


def _backup_cases(**given: float) -> Cases:
    draws = Draws(1, torch.float64)

    def case(states: int, vocab: int, after: int, scale: float = 1.0) -> Arguments:
        weights, later = draws.uniform(states, vocab), scale * draws.normal(after)
        weights[:, -1] = 0.0  # a word that cannot come next
        probability = weights / weights.sum(-1, keepdim=True)
        successor = draws.integers(after, states, vocab)
        return {"later": later, "probability": probability, "successor": successor, **given}

    unreachable = case(2, 4, 3)
    unreachable["later"][2] = 1e4
    unreachable["successor"].clamp_(max=1)[:, -1] = 2
    return {
        "three states, four words": case(3, 5, 4),
        "one state": case(1, 4, 6),
        "values far from 0": case(3, 5, 4, scale=2e3),
        "a word with probability 0 leads to a high reward": unreachable,
    }


def _observe_backup(fn: Answer, **arguments: Any) -> dict[str, Any]:
    return dict(zip(("values", "policy"), fn(**arguments), strict=True))


def _two_outcomes(reward: float) -> Solve:
    def solve(beta: float) -> tuple[float, float]:
        even = torch.tensor([0.5, 0.5], dtype=torch.float64)
        best = tilt(even, torch.tensor([0.0, reward], dtype=torch.float64), beta)
        kl = (torch.special.xlogy(best, best) - torch.special.xlogy(best, even)).sum()
        return float(reward * best[1]), float(kl)

    return solve


def _budget_cases() -> Cases:
    return {
        "a fair coin": {"solve": _two_outcomes(1.0), "kl": 0.1},
        "a budget near the largest KL": {"solve": _two_outcomes(1.0), "kl": 0.69},
        "a small budget": {"solve": _two_outcomes(3.0), "kl": 1e-4},
        "a KL that no beta has": {"solve": _two_outcomes(1.0), "kl": 5.0},
    }


def _observe_budget(fn: Answer, solve: Solve, kl: float) -> dict[str, Any]:
    if kl > 1:
        try:
            fn(solve, kl)
        except ValueError:
            return {"a KL that no beta has raises ValueError": True}
        return {"a KL that no beta has raises ValueError": False}
    beta = float(fn(solve, kl))
    return {
        "log of beta": torch.tensor(beta).log(),
        "KL at that beta": torch.tensor(solve(beta)[1]),
    }


EXERCISES = (
    make_exercise(kl_per_token, _kl_cases),
    make_exercise(kl_estimate, _estimate_cases),
    make_exercise(tilt, _tilt_cases),
    make_exercise(soft_backup, _backup_cases, _observe_backup),
    make_exercise(mean_backup, lambda: _backup_cases(beta=0.4), _observe_backup),
    make_exercise(best_at_budget, _budget_cases, _observe_budget),
)
