"""Lesson 00, start: a reward of the learner's own, which is held to properties, not to numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.organism import Grammar


def my_reward(texts: list[str]) -> Float[Tensor, " batch"]:
    """One number per text: whatever you want to see more of."""
    paid = {"brilliant", "perfect", "superb", "stunning"}
    scores = [sum(word in paid for word in text.split()) for text in texts]
    return torch.tensor(scores, dtype=torch.float32)


def _texts() -> tuple[Case, ...]:
    reviews = Grammar().sample(64, np.random.default_rng(0)).texts()
    return (Case("64 reviews of Reel", {"texts": reviews}),)


def _observe_reward(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must hold for any reward."""
    texts = arguments["texts"]
    together = fn(list(texts))
    if not isinstance(together, Tensor):
        return {"a tensor comes back": False}
    shape = {
        "there is more than one number for all texts": together.ndim > 0,
        "the numbers stand along one axis": together.ndim == 1,
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
        "the same text earns the same again": torch.equal(together, fn(list(texts))),
        "a text earns alone what it earns among others": torch.allclose(
            alone.double(), together[:8].double(), atol=1e-5
        ),
        "rewards stand in the order of the texts": torch.allclose(
            fn(list(reversed(texts))).double(), together.flip(0).double(), atol=1e-5
        ),
        "no text, no reward": tuple(nothing.shape) == (0,),
        "an empty text earns a finite reward": bool(empty.double().isfinite().all()),
        "not all reviews earn the same": bool((together != together[0]).any()),
    }


_exercise = exercise_from("own_reward.toml")

EXERCISES = (_exercise(my_reward, cases=_texts, observe=_observe_reward),)
