"""Exercises on the objective: its terms, KL, the optimal policy, and measures of failure."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.functional import (
    calc_clipped_surrogate_objective,
    calc_entropy_bonus,
    calc_kl_penalty,
    calc_value_function_loss,
    tilt,
    tilt_slopes,
)
from rlhf_lab.organism import best_at_budget, mean_backup, soft_backup
from rlhf_lab.training import AdaptiveKLController


def whole_objective(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    entropy: Float[Tensor, "batch gen"],
    kl: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    clip_coef: float,
    vf_coef: float,
    ent_coef: float,
    kl_coef: float,
) -> Float[Tensor, ""]:
    """Compute the objective of a minibatch, which is maximized; its terms average over real tokens.

    J = L_clip - L_V + c_H H - beta KL
    """
    surrogate = calc_clipped_surrogate_objective(
        logprobs, old_logprobs, advantages, clip_coef, mask
    )
    value_loss = calc_value_function_loss(values, returns, vf_coef, mask)
    entropy_bonus = calc_entropy_bonus(entropy, ent_coef, mask)
    kl_penalty = calc_kl_penalty(kl, kl_coef, mask)
    return surrogate - value_loss + entropy_bonus - kl_penalty


def _observe_controller(build: Answer, kls: list[float], **fields: Any) -> dict[str, Any]:
    controller, facts = build(**fields), {}
    for batch, kl in enumerate(kls, start=1):
        facts[f"returned after batch {batch} (KL {kl})"] = controller.update(kl, 128)
        facts[f"kl_coef after batch {batch} (KL {kl})"] = controller.kl_coef
    return facts


_whole = make_exercise(whole_objective)
_controller = make_exercise(AdaptiveKLController, observe=_observe_controller)


@exercise(tilt)
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


def _observe_budget(fn: Answer, reward: float, kl: float) -> dict[str, Any]:
    def solve(beta: float) -> tuple[float, float]:  # of two outcomes, one with the reward
        even = torch.tensor([0.5, 0.5], dtype=torch.float64)
        best = tilt(even, torch.tensor([0.0, reward], dtype=torch.float64), beta)
        found = (torch.special.xlogy(best, best) - torch.special.xlogy(best, even)).sum()
        return float(reward * best[1]), float(found)

    beta = float(fn(solve, kl))
    return {
        "log of beta": torch.tensor(beta).log(),
        "KL at that beta": torch.tensor(solve(beta)[1]),
    }


_budget = make_exercise(best_at_budget, observe=_observe_budget)
_soft_backup = make_exercise(soft_backup, _backup_cases)
_mean_backup = make_exercise(mean_backup, lambda: _backup_cases(beta=0.4))


def _observe_slopes(fn: Answer, **arguments: Any) -> Any:
    found = fn(**arguments)
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
