"""Lesson 07, what breaks RLHF: slopes of a tilt, excess KL, distinct n-grams, promoted mass."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.functional import distinct_n, excess_kl, promoted_mass, tilt, tilt_slopes


def _slope_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, n: int, beta: float) -> Case:
        draw = lambda: torch.randn(n, generator=generator, dtype=torch.float64)
        reward, measured = draw(), draw()
        even = torch.full((n,), 1 / n, dtype=torch.float64)
        probs = tilt(even, reward, beta)
        return Case(label, {"probs": probs, "reward": reward, "measured": measured})

    against = case("the other score falls as the reward rises", 4, 2.0).arguments
    return (
        case("five texts", 5, 1.0),
        case("a policy that is tilted far", 6, 0.3),
        Case(
            "the other score falls as the reward rises",
            against | {"measured": 3.0 - against["reward"]},
        ),
        case("one text", 1, 1.0),
    )


def _excess_cases() -> tuple[Case, ...]:
    rewards = torch.tensor([0.5, 0.8, 0.9, 0.95], dtype=torch.float64)
    nats = torch.tensor([0.0, 0.3, 0.7, 1.5], dtype=torch.float64)

    def case(label: str, reward: float, kl: float, order: tuple[int, ...] = (0, 1, 2, 3)) -> Case:
        rows = list(order)
        given = {"reward": reward, "kl": kl, "frontier_reward": rewards[rows]}
        return Case(label, given | {"frontier_kl": nats[rows]})

    return (
        case("a reward between two points", 0.86, 2.0),
        case("the first of the points", 0.5, 0.4),
        case("points in another order", 0.65, 1.0, (2, 0, 3, 1)),
        case("a policy on the frontier", 0.8, 0.3),
        case("fewer nats than the frontier spends", 0.86, 0.4),
        case("more reward than the frontier has", 0.97, 3.0),
        case("less reward than the frontier has", 0.4, 0.2),
    )


def _distinct_cases() -> tuple[Case, ...]:
    tokens = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 9], [7, 7, 7, 7, 1]])
    ends = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    hole = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    given = lambda n, **more: {"tokens": tokens, "n": n} | more
    return (
        Case("pairs of tokens", given(2)),
        Case("single tokens", given(1)),
        Case("threes", given(3)),
        Case("texts that end early", given(2, mask=ends)),
        Case("a masked token in the middle", given(2, mask=hole)),
        Case("texts that are shorter than n", given(6)),
    )


def _promoted_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(1)

    def case(label: str, batch: int, gen: int, keep: float | None = None) -> Case:
        draw = lambda: torch.randn(batch, gen, 5, generator=generator)
        arguments = {"logits": 2 * draw(), "ref_logits": draw()}
        if keep is not None:
            arguments["mask"] = torch.rand(batch, gen, generator=generator) < keep
        return Case(label, arguments)

    return (
        case("two texts", 2, 4),
        case("one text of one token", 1, 1),
        case("texts that end early", 3, 6, keep=0.5),
        case("no real token", 2, 3, keep=0.0),
    )


def _observe_slopes(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    found = fn(**arguments)
    if not isinstance(found, tuple) or len(found) != 2:
        return found
    in_float32 = [x == torch.tensor(x, dtype=torch.float32).item() for x in found if x]
    slopes = {"slope of reward": found[0], "slope of measured": found[1]}
    return slopes | {"rounded to float32": bool(in_float32) and all(in_float32)}


def _as_tensor(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensor:
    return torch.tensor(float(fn(**arguments)), dtype=torch.float64)


EXERCISES = (
    make_exercise(tilt_slopes, cases=_slope_cases, observe=_observe_slopes),
    make_exercise(excess_kl, cases=_excess_cases, observe=_as_tensor),
    make_exercise(distinct_n, cases=_distinct_cases, observe=_as_tensor),
    make_exercise(promoted_mass, cases=_promoted_cases),
)
