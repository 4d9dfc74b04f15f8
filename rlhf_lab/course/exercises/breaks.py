"""Exercises on what breaks RLHF: slopes of a tilt, excess KL, distinct n-grams, promoted mass."""

from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.exercise import Answer, exercise
from rlhf_lab.functional import distinct_n, excess_kl, promoted_mass, tilt, tilt_slopes


def _observe_slopes(fn: Answer, **arguments: Any) -> Any:
    found = fn(**arguments)
    if not isinstance(found, tuple) or len(found) != 2:
        return found
    in_float32 = [x == torch.tensor(x, dtype=torch.float32).item() for x in found if x]
    slopes = {"slope of reward": found[0], "slope of measured": found[1]}
    return slopes | {"rounded to float32": bool(in_float32) and all(in_float32)}


@exercise(tilt_slopes, _observe_slopes)
def _slope_cases() -> Cases:
    draws = Draws(0, torch.float64)

    def case(n: int, beta: float) -> Arguments:
        reward, measured = draws.normal(n), draws.normal(n)
        probs = tilt(torch.full_like(reward, 1 / n), reward, beta)
        return {"probs": probs, "reward": reward, "measured": measured}

    against = case(4, 2.0)
    return {
        "five texts": case(5, 1.0),
        "a strongly tilted policy": case(6, 0.3),
        "the other score falls as the reward rises": against
        | {"measured": 3.0 - against["reward"]},
        "one text": case(1, 1.0),
    }


def _as_tensor(fn: Answer, **arguments: Any) -> Tensor:
    return torch.tensor(float(fn(**arguments)), dtype=torch.float64)


@exercise(excess_kl, _as_tensor)
def _excess_cases() -> Cases:
    rewards = torch.tensor([0.5, 0.8, 0.9, 0.95], dtype=torch.float64)
    nats = torch.tensor([0.0, 0.3, 0.7, 1.5], dtype=torch.float64)

    def case(reward: float, kl: float, order: list[int] | slice = slice(None)) -> Arguments:
        frontier = {"frontier_reward": rewards[order], "frontier_kl": nats[order]}
        return {"reward": reward, "kl": kl} | frontier

    return {
        "a reward between two points": case(0.86, 2.0),
        "the first of the points": case(0.5, 0.4),
        "points in a different order": case(0.65, 1.0, [2, 0, 3, 1]),
        "a policy on the frontier": case(0.8, 0.3),
        "less KL than on the frontier": case(0.86, 0.4),
        "more reward than any frontier point": case(0.97, 3.0),
        "less reward than any frontier point": case(0.4, 0.2),
    }


@exercise(distinct_n, _as_tensor)
def _distinct_cases() -> Cases:
    tokens = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 9], [7, 7, 7, 7, 1]])
    ends = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    hole = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    return {
        "pairs of tokens": {"tokens": tokens, "n": 2},
        "single tokens": {"tokens": tokens, "n": 1},
        "threes": {"tokens": tokens, "n": 3},
        "texts that end early": {"tokens": tokens, "n": 2, "mask": ends},
        "a masked token in the middle": {"tokens": tokens, "n": 2, "mask": hole},
        "texts that are shorter than n": {"tokens": tokens, "n": 6},
    }


@exercise(promoted_mass)
def _promoted_cases() -> Cases:
    draws = Draws(1)
    logits = lambda *shape: {"logits": 2 * draws.normal(*shape), "ref_logits": draws.normal(*shape)}
    return {
        "two texts": logits(2, 4, 5),
        "one text of one token": logits(1, 1, 5),
        "texts that end early": logits(3, 6, 5) | {"mask": draws.uniform(3, 6) < 0.5},
        "no real token": logits(2, 3, 5) | {"mask": torch.zeros(2, 3).bool()},
    }
