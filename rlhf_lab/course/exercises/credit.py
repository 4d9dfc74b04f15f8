"""Lesson 03, rewards and credit: the reward, exact values, the policy gradient, groups, noise."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import (
    gradient_cosine,
    grpo_advantages,
    policy_gradient_objective,
    rloo_advantages,
)
from rlhf_lab.organism import backward_values
from rlhf_lab.rewards import SentimentReward, sentiment_reward

_LONG = "this movie wow , the plot was so superb and the ending was really dull"
_SHORT = "this film was dull"
_MIDDLE = "this movie honestly , the plot wasn't so good"
_OTHER = "this film wow , the cast was so boring but the plot was perfect"


@functools.cache
def _classifier() -> SentimentReward:
    """The bundled classifier: a check scores some hundred texts, and reading its files is slow."""
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
    """The rewards, and whether a gradient hangs on to them, with a classifier that could learn."""
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
        """Tables of a language with so many states at each position."""
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
    """How many positions there are, and the values of each."""
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
    """A group whose rewards are equal, beside another."""
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


_exercise = exercise_from("credit.toml")

EXERCISES = (
    _exercise(sentiment_reward, cases=_sentiment_cases, observe=_observe_sentiment),
    _exercise(backward_values, cases=_backward_cases, observe=_observe_backward),
    _exercise(policy_gradient_objective, cases=_objective_cases),
    _exercise(rloo_advantages, cases=_rloo_cases),
    _exercise(grpo_advantages, cases=_grpo_cases),
    _exercise(gradient_cosine, cases=_cosine_cases),
)
