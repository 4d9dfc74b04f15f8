"""Lesson 03, rewards and credit: rewards, exact values, the policy gradient, advantages."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.functional import (
    compute_advantages,
    compute_gae,
    compute_returns,
    gradient_cosine,
    grpo_advantages,
    normalize_reward,
    policy_gradient_objective,
    rloo_advantages,
)
from rlhf_lab.organism import backward_values
from rlhf_lab.rewards import SentimentReward, sentiment_reward


def _normalize_cases() -> tuple[Case, ...]:
    cases = standard_cases(normalize_reward, large={"reward": 1e6})
    rewards = draw(normalize_reward, {"batch": 4}, 7)
    return (
        *cases,
        Case("large eps", rewards | {"eps": 0.5}),
        Case("equal rewards", {"reward": torch.full((4,), 0.25)}),
        Case("equal rewards whose mean is rounded", {"reward": torch.full((7,), 1000.1)}),
        Case("half precision", {"reward": rewards["reward"].half()}),
    )


_LONG = "this movie wow , the plot was so superb and the ending was really dull"
_SHORT = "this film was dull"
_MIDDLE = "this movie honestly , the plot wasn't so good"
_OTHER = "this film wow , the cast was so boring but the plot was perfect"


@functools.cache
def _classifier() -> SentimentReward:
    return SentimentReward("reel-sentiment")


def _sentiment_cases() -> tuple[Case, ...]:
    texts = [_LONG, _OTHER, _MIDDLE, _SHORT]
    return (
        Case("texts of unequal length", {"texts": texts, "positive": 1}),
        Case(
            "texts of one length", {"texts": [_LONG, _LONG.replace("dull", "fine")], "positive": 1}
        ),
        Case("a single text", {"texts": [_SHORT], "positive": 1}),
        Case("the other class", {"texts": texts, "positive": 0}),
        Case("another order", {"texts": texts[::-1], "positive": 1}),
        Case("cut at 6 tokens", {"texts": texts, "positive": 1, "max_length": 6}),
    )


def _observe_sentiment(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    parts = _classifier()
    parts.model.requires_grad_(True)
    try:
        found = fn(tokenizer=parts.tokenizer, classifier=parts.model, **arguments)
    finally:
        parts.model.requires_grad_(False)
    if not isinstance(found, Tensor):
        return found
    return {"result": found.detach(), "has a gradient": found.requires_grad}


def _backward_cases() -> tuple[Case, ...]:
    rng = np.random.default_rng(0)

    def case(label: str, *sizes: int, vocab: int = 4, zeros: bool = False) -> Case:
        probability, successor = [], []
        for here, behind in zip(sizes[:-1], sizes[1:], strict=True):
            chance = rng.random((here, vocab)) + 0.1
            following = rng.integers(0, behind, (here, vocab))
            if zeros:
                chance[:, 1], following[:, 1] = 0.0, 0
            probability.append(chance / chance.sum(1, keepdims=True))
            successor.append(following)
        tables = {"probability": probability, "successor": successor}
        return Case(label, {"final": rng.normal(size=sizes[-1])} | tables)

    return (
        case("three words", 1, 2, 3, 5),
        case("words that cannot come", 1, 3, 3, 4, zeros=True),
        case("as many states at each position", 3, 3, 3),
        case("one word", 1, 4),
        case("nothing to come", 3),
    )


def _observe_backward(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    copies = {
        name: [x.copy() for x in part] if isinstance(part, list) else part.copy()
        for name, part in arguments.items()
    }
    found = list(fn(**copies))
    levels = {f"position {t}": torch.as_tensor(level).double() for t, level in enumerate(found)}
    return {"positions": len(found)} | levels


def _objective_cases() -> tuple[Case, ...]:
    return standard_cases(
        policy_gradient_objective, large={"advantages": 1e4}, spoil=("advantages", "logprobs")
    )


_GROUPS = {
    "two groups in turn": [0, 1, 0, 1, 0, 1],
    "one group": [0, 0, 0, 0],
    "groups of unequal size": [2, 0, 2, 0, 2, 2, 0],
    "a large group number": [70, 3, 3, 70, 70],
    "pairs": [0, 0, 1, 1],
}


def _group_cases() -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    return [
        Case(label, {"rewards": torch.randn(len(g), generator=generator), "group": torch.tensor(g)})
        for label, g in _GROUPS.items()
    ]


def _equal_rewards(copies: int) -> Case:
    rewards = torch.tensor([0.5] * copies + [1.0, 3.0])
    group = torch.tensor([0] * copies + [1, 1])
    return Case("a group of equal rewards", {"rewards": rewards, "group": group})


def _rloo_cases() -> tuple[Case, ...]:
    return (*_group_cases(), _equal_rewards(7))


def _grpo_cases() -> tuple[Case, ...]:
    ordinary = _group_cases()[0].arguments
    tiny = ordinary | {"rewards": 1e-3 * ordinary["rewards"]}
    lone = {"rewards": torch.tensor([1.0, 2.0, 5.0]), "group": torch.tensor([0, 0, 1])}
    return (
        *_group_cases(),
        _equal_rewards(7),
        Case("a group of one", lone),
        Case("rewards with hardly a spread", tiny),
        Case("large eps", ordinary | {"eps": 0.5}),
        Case("normalize_std=False", ordinary | {"normalize_std": False}),
    )


def _cosine_cases() -> tuple[Case, ...]:
    def case(label: str, batch: int, n: int, seed: int, parameters: int = 5) -> Case:
        sizes = {"batch": batch, "parameters": parameters}
        return Case(label, draw(gradient_cosine, sizes, seed, {"n": n}))

    long_rows = case("rows of unequal length", 6, 2, 5).arguments
    factors = torch.tensor([10.0, 1, 1, 5, 0.1, 1])[:, None]
    return (
        case("batches of 2", 6, 2, 0),
        case("batches of 3", 9, 3, 1, 4),
        case("an incomplete batch at the end", 8, 3, 2),
        case("a single batch", 4, 4, 3),
        case("batches of 1", 3, 1, 4),
        Case("rows of unequal length", long_rows | {"gradients": factors * long_rows["gradients"]}),
    )


# as with a tool's output between the tokens of the policy
HOLES = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]]).bool()


def _one_step_cases() -> tuple[Case, ...]:
    cases = standard_cases(
        compute_advantages, large={"values": 1e6, "rewards": 1e6}, spoil=("values",)
    )
    sizes = {"batch": 3, "gen": 4}
    arguments = draw(compute_advantages, sizes, 8, {"gamma": 0.9}, optional=("mask",))
    token_rewards = torch.randn(3, 4, generator=torch.Generator().manual_seed(9))
    holes = arguments | {"rewards": token_rewards, "mask": HOLES}
    return (
        *cases,
        Case("a reward for each token, discounted", arguments | {"rewards": token_rewards}),
        Case("holes in the mask", holes),
    )


def _gae_cases() -> tuple[Case, ...]:
    large = {"values": 1e6, "token_rewards": 1e6}
    spoil = ("values", "token_rewards")
    cases = standard_cases(compute_gae, large=large, spoil=spoil, gamma=0.9, lam=0.8)
    undiscounted = draw(compute_gae, {"batch": 3, "gen": 4}, 11)
    holes = draw(compute_gae, {"batch": 3, "gen": 4}, 12, {"gamma": 0.9, "lam": 0.8})
    return (
        *cases,
        Case("gamma and lam as by default", undiscounted),
        Case("holes in the mask", holes | {"mask": HOLES}),
    )


EXERCISES = (
    make_exercise(normalize_reward, cases=_normalize_cases),
    make_exercise(sentiment_reward, cases=_sentiment_cases, observe=_observe_sentiment),
    make_exercise(backward_values, cases=_backward_cases, observe=_observe_backward),
    make_exercise(policy_gradient_objective, cases=_objective_cases),
    make_exercise(rloo_advantages, cases=_rloo_cases),
    make_exercise(grpo_advantages, cases=_grpo_cases),
    make_exercise(gradient_cosine, cases=_cosine_cases),
    make_exercise(compute_advantages, cases=_one_step_cases),
    make_exercise(compute_gae, cases=_gae_cases),
    make_exercise(
        compute_returns,
        cases=lambda: standard_cases(
            compute_returns,
            large={"advantages": 1e6, "values": 1e6},
            spoil=("advantages", "values"),
        ),
    ),
)
