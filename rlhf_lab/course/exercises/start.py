"""Lesson 00, start: sums and means with a mask, and a reward of the learner's own."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.functional import masked_mean, sequence_sum
from rlhf_lab.organism import Grammar


def _masked_mean_cases() -> tuple[Case, ...]:
    sizes = {"batch": 3, "gen": 4}
    masked = draw(sequence_sum, sizes, 0, optional=("mask",))
    x, mask = masked["x"], masked["mask"]
    one = draw(sequence_sum, {"batch": 1, "gen": 1}, 1)
    return (
        Case("ordinary", {"x": x}),
        Case("masked", masked),
        Case("masked, along an axis", masked | {"dim": -1}),
        Case("along the first axis", {"x": x, "dim": 0}),
        Case("batch of 1, one token", one),
        Case("no token is real", {"x": x, "mask": torch.zeros_like(mask)}),
        Case("with a denominator", masked | {"denominator": 7}),
        Case("with a denominator below 1", masked | {"denominator": 0.5}),
        Case("with a denominator of 0", masked | {"denominator": 0}),
        Case("nan where the mask is False", {"x": x.masked_fill(~mask, torch.nan), "mask": mask}),
        Case("large numbers", {"x": x * 1e30}),
        Case("half precision", {"x": x.half()}),
    )


def _sum_cases() -> tuple[Case, ...]:
    x = draw(sequence_sum, {"batch": 3, "gen": 4}, 9)["x"]
    x[1, 2] = torch.nan
    cases = standard_cases(sequence_sum, large={"x": 1e30}, spoil=("x",))
    return (*cases, Case("nan at a real token", {"x": x}))


def my_reward(texts: list[str]) -> Float[Tensor, " batch"]:
    """One number per text, higher for what you want to see more of."""
    praise = {"brilliant", "perfect", "superb", "stunning"}
    scores = [sum(word in praise for word in text.split()) for text in texts]
    return torch.tensor(scores, dtype=torch.float32)


def _texts() -> tuple[Case, ...]:
    reviews = Grammar().sample(64, np.random.default_rng(0)).texts()
    return (Case("64 reviews of Reel", {"texts": reviews}),)


def _observe_reward(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    texts = arguments["texts"]
    together = fn(list(texts))
    if not isinstance(together, Tensor):
        return {"a tensor comes back": False}
    shape = {
        "there is more than one number for all texts": together.ndim > 0,
        "the numbers are along one axis": together.ndim == 1,
        "there is one number per text": together.shape[:1] == (len(texts),),
    }
    if not all(shape.values()):
        return {"a tensor comes back": True} | shape
    alone = torch.stack([fn([text])[0] for text in texts[:8]])
    nothing, empty = fn([]), fn([""])
    return {
        "a tensor comes back": True,
        **shape,
        "the numbers are floats": together.is_floating_point(),
        "they are finite": bool(together.isfinite().all()),
        "the same text has the same reward again": torch.equal(together, fn(list(texts))),
        "the reward of a text does not depend on the others": torch.allclose(
            alone.double(), together[:8].double(), atol=1e-5
        ),
        "rewards are in the order of the texts": torch.allclose(
            fn(list(reversed(texts))).double(), together.flip(0).double(), atol=1e-5
        ),
        "no text, no reward": tuple(nothing.shape) == (0,),
        "the reward of an empty text is finite": bool(empty.double().isfinite().all()),
        "not all rewards are equal": bool((together != together[0]).any()),
    }


EXERCISES = (
    make_exercise(sequence_sum, cases=_sum_cases),
    make_exercise(masked_mean, cases=_masked_mean_cases),
    make_exercise(my_reward, cases=_texts, observe=_observe_reward),
)
