"""Exercises on start: a mean with a mask, and a reward that the learner writes."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course.cases import Cases, draw
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.functional import masked_mean, sequence_sum
from rlhf_lab.organism import Grammar


def _masked_mean_cases() -> Cases:
    masked = draw(sequence_sum, {"batch": 3, "gen": 4}, 0, optional=("mask",))
    x, mask = masked["x"], masked["mask"]
    return {
        "ordinary": {"x": x},
        "masked": masked,
        "masked, along an axis": masked | {"dim": -1},
        "along the first axis": {"x": x, "dim": 0},
        "batch of 1, one token": draw(sequence_sum, {"batch": 1, "gen": 1}, 1),
        "no token is real": {"x": x, "mask": torch.zeros_like(mask)},
        "with a denominator": masked | {"denominator": 7},
        "with a denominator below 1": masked | {"denominator": 0.5},
        "with a denominator of 0": masked | {"denominator": 0},
        "nan where the mask is False": {"x": x.masked_fill(~mask, torch.nan), "mask": mask},
        "large numbers": {"x": x * 1e30},
        "half precision": {"x": x.half()},
    }


def my_reward(texts: list[str]) -> Float[Tensor, " batch"]:
    """Return one number per text, higher for what you want to see more of."""
    praise = {"brilliant", "perfect", "superb", "stunning"}
    scores = [sum(word in praise for word in text.split()) for text in texts]
    return torch.tensor(scores, dtype=torch.float32)


def _review_cases() -> Cases:
    return {"64 reviews of Reel": {"texts": Grammar().sample(64, np.random.default_rng(0)).texts()}}


def _observe_reward(fn: Answer, texts: list[str]) -> dict[str, Any]:
    together = fn(list(texts))
    if not isinstance(together, Tensor):
        return {"the function returns a tensor": False}
    facts = {
        "the function returns a tensor": True,
        "there is more than one number for all texts": together.ndim > 0,
        "the tensor has one axis": together.ndim == 1,
        "there is one number per text": together.shape[:1] == (len(texts),),
    }
    if not all(facts.values()):
        return facts
    close = lambda one, other: torch.allclose(one.double(), other.double(), atol=1e-5)
    alone = torch.stack([fn([text])[0] for text in texts[:8]])
    return facts | {
        "the numbers are floats": together.is_floating_point(),
        "the numbers are finite": bool(together.isfinite().all()),
        "the same text gets the same reward again": torch.equal(together, fn(list(texts))),
        "a text's reward does not depend on the other texts": close(alone, together[:8]),
        "rewards are in the order of the texts": close(fn(texts[::-1]), together.flip(0)),
        "without texts, the tensor is empty": tuple(fn([]).shape) == (0,),
        "the reward of an empty text is finite": bool(fn([""]).double().isfinite().all()),
        "not all rewards are equal": bool((together != together[0]).any()),
    }


EXERCISES = (
    make_exercise(masked_mean, _masked_mean_cases),
    make_exercise(my_reward, _review_cases, _observe_reward),
)
