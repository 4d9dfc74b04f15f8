"""Lesson 04, the leash and the optimum: the best policy at a price per nat, and the other leash."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import tilt
from rlhf_lab.organism import best_at_budget, mean_backup, soft_backup


def _tilt_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, *shape: int, beta: float = 0.5, scale: float = 1.0) -> Case:
        chances = torch.rand(shape, generator=generator)
        rewards = scale * torch.randn(shape, generator=generator)
        chances = chances / chances.sum(-1, keepdim=True)
        return Case(label, {"chances": chances, "rewards": rewards, "beta": beta})

    impossible = case("an outcome that cannot happen, and would pay most", 4)
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
    """Both results by name."""
    value, policy = fn(**arguments)
    return {"values": value, "policy": policy}


def _two_outcomes(reward: float) -> Callable[[float], tuple[float, float]]:
    """Solves a fair coin, one side of which pays."""

    def solve(beta: float) -> tuple[float, float]:
        chances = torch.tensor([0.5, 0.5], dtype=torch.float64)
        best = tilt(chances, torch.tensor([0.0, reward], dtype=torch.float64), beta)
        kl = (torch.special.xlogy(best, best) - torch.special.xlogy(best, chances)).sum()
        return float(reward * best[1]), float(kl)

    return solve


def _budget_cases() -> tuple[Case, ...]:
    return (
        Case("a fair coin", {"solve": _two_outcomes(1.0), "kl": 0.1}),
        Case("nearly all that there is to spend", {"solve": _two_outcomes(1.0), "kl": 0.69}),
        Case("a small budget", {"solve": _two_outcomes(3.0), "kl": 1e-4}),
        Case("a budget that no price spends", {"solve": _two_outcomes(1.0), "kl": 5.0}),
    )


def _observe_budget(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The price, in nats as well, or whether a budget that no price spends is refused."""
    if arguments["kl"] > 1:
        try:
            fn(**arguments)
        except ValueError:
            return {"a budget that no price spends raises ValueError": True}
        return {"a budget that no price spends raises ValueError": False}
    price = fn(**arguments)
    return {
        "log of the price": torch.tensor(float(price)).log(),
        "nats spent at that price": torch.tensor(arguments["solve"](float(price))[1]),
    }


def _read_budget(fn: Callable[..., Any], case: Case) -> str | None:
    """What is wrong with a search, from the prices that it tries.

    1. The logarithm of the last price came back, or what was spent or earned there.
    2. The prices are those of a fixed list; or they move the wrong way, or by the reward.
    3. The right price lies outside of all that were tried.
    4. Few prices are tried, or it is near the right one, and stops too early.
    """
    tried: list[tuple[float, float, float]] = []

    def solve(beta: float) -> tuple[float, float]:
        reward, nats = case.arguments["solve"](beta)
        tried.append((float(beta), reward, nats))
        return reward, nats

    found = float(fn(solve, case.arguments["kl"]))
    right = best_at_budget(**case.arguments)
    if not tried:
        return "solve is never called: try prices, and see what each spends"
    beta, reward, nats = tried[-1]
    if beta > 0 and abs(math.log(beta) - found) < 0.02 * abs(found):
        return "this is the logarithm of the price: take exp of it in the end"
    if abs(reward - found) < 1e-3 * abs(found):
        return "this is the reward at that price: return the price"
    if abs(nats - found) < 1e-3 * abs(found):
        return "these are the nats that are spent at that price: return the price"
    steps_up = [b[0] > a[0] for a, b in pairwise(tried)]
    low, high = min(b for b, *_ in tried), max(b for b, *_ in tried)
    if low < right < high and len(steps_up) > 8 and len(set(steps_up)) == 1:
        return (
            "the prices are those of a fixed list, and none of them spends just this budget: let "
            "what one spends decide which to try next"
        )
    moves = [
        (b[0] > a[0], a[2] > case.arguments["kl"], a[1] > case.arguments["kl"])
        for a, b in pairwise(tried)
    ]
    if len(moves) > 5 and sum(up != dear for up, dear, _ in moves) >= 0.9 * len(moves):
        return (
            "the search goes the wrong way: a price that spends too much is too low, since the "
            "dearer a nat, the fewer are spent"
        )
    by_nats = sum(up == dear for up, dear, _ in moves)
    if sum(up == earns for up, _, earns in moves) > max(by_nats, 0.9 * len(moves)):
        return "the search goes by the reward; a budget is in nats, the second of the two numbers"
    if not low <= right <= high:
        return (
            f"only prices from {low:.3g} to {high:.3g} are tried, and the one that spends this "
            "budget lies outside: search from 1e-4 to 1e4, by the logarithm"
        )
    if len(tried) < 20 or abs(math.log(found / right)) < 1.0:
        return (
            f"the search ends too early, after {len(tried)} prices: halve the range between "
            "two prices about 60 times"
        )
    return None


_exercise = exercise_from("leash.toml")

EXERCISES = (
    _exercise(tilt, cases=_tilt_cases),
    _exercise(soft_backup, cases=_backup_cases, observe=_observe_backup),
    _exercise(mean_backup, cases=lambda: _backup_cases(beta=0.4), observe=_observe_backup),
    _exercise(best_at_budget, cases=_budget_cases, observe=_observe_budget, reads=_read_budget),
)
