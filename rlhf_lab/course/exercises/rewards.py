"""Exercises on rewards, credit and preferences: exact values, advantages, raters, DPO, LoRA."""

import functools
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws, draw, standard_cases
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.functional import (
    best_of_n_weights,
    calibration_bins,
    gradient_cosine,
    grpo_advantages,
    masked_mean,
    rloo_advantages,
    sequence_sum,
)
from rlhf_lab.models.lora import LoRALinear
from rlhf_lab.organism import Grammar, backward_values
from rlhf_lab.rewards import SentimentReward, sentiment_reward


@exercise(masked_mean)
def _masked_mean_cases() -> Cases:
    cases = standard_cases(sequence_sum, large={"x": 1e30}, spoil=["x"])
    masked = cases["masked"]
    return cases | {
        "masked, along an axis": masked | {"dim": -1},
        "along the first axis": cases["ordinary"] | {"dim": 0},
        "no token is real": masked | {"mask": torch.zeros(3, 4).bool()},
        "with a denominator": masked | {"denominator": 7},
        "with a denominator below 1": masked | {"denominator": 0.5},
        "with a denominator of 0": masked | {"denominator": 0},
        "half precision": {"x": cases["ordinary"]["x"].half()},
    }


def my_reward(texts: list[str]) -> Float[Tensor, " batch"]:
    """Return one number per text, higher for what you want to see more of."""
    praise = {"brilliant", "perfect", "superb", "stunning"}
    scores = [sum(word in praise for word in text.split()) for text in texts]
    return torch.tensor(scores, dtype=torch.float32)


def _observe_reward(fn: Answer, texts: list[str]) -> dict[str, Any]:
    together = fn(list(texts))
    facts = {
        "axes of the tensor": together.ndim,
        "there is one number per text": together.shape[:1] == (len(texts),),
    }
    if together.shape != (len(texts),) or not texts:
        return facts
    close = lambda one, other: torch.allclose(one.double(), other.double(), atol=1e-5)
    alone = torch.stack([fn([text])[0] for text in texts[:8]])
    return facts | {
        "the numbers are floats": together.is_floating_point(),
        "the numbers are finite": bool(together.isfinite().all()),
        "the same text gets the same reward again": torch.equal(together, fn(list(texts))),
        "a text's reward does not depend on the other texts": close(alone, together[:8]),
        "rewards are in the order of the texts": close(fn(texts[::-1]), together.flip(0)),
        "not all rewards are equal": bool((together != together[0]).any()),
    }


@exercise(my_reward, _observe_reward)
def _review_cases() -> Cases:
    reviews = Grammar().sample(64, np.random.default_rng(0)).texts()
    batches = {"64 reviews of Reel": reviews, "an empty list": [], "an empty text": [""]}
    return {label: {"texts": texts} for label, texts in batches.items()}


@functools.cache
def _classifier() -> SentimentReward:
    return SentimentReward("reel-sentiment")


def _observe_sentiment(fn: Answer, **arguments: Any) -> Any:
    parts = _classifier()
    parts.model.requires_grad_(True)
    try:
        found = fn(tokenizer=parts.tokenizer, classifier=parts.model, **arguments)
    finally:
        parts.model.requires_grad_(False)
    return {"result": found.detach(), "has a gradient": found.requires_grad}


@exercise(sentiment_reward, _observe_sentiment)
def _sentiment_cases() -> Cases:
    long = "this movie wow , the plot was so superb and the ending was really dull"
    middle = "this movie honestly , the plot wasn't so good"
    other = "this film wow , the cast was so boring but the plot was perfect"
    short = "this film was dull"
    texts = [long, other, middle, short]
    return {
        "texts of different lengths": {"texts": texts, "positive": 1},
        "texts of equal length": {"texts": [long, long.replace("dull", "fine")], "positive": 1},
        "a single text": {"texts": [short], "positive": 1},
        "the other class": {"texts": texts, "positive": 0},
        "a different order": {"texts": texts[::-1], "positive": 1},
        "cut at 6 tokens": {"texts": texts, "positive": 1, "max_length": 6},
    }


def _observe_backward(fn: Answer, final: Any, probability: list, successor: list) -> dict[str, Any]:
    tables = [[x.copy() for x in table] for table in (probability, successor)]
    found = list(fn(final.copy(), *tables))
    levels = {f"position {t}": torch.as_tensor(level).double() for t, level in enumerate(found)}
    return {"positions": len(found)} | levels


@exercise(backward_values, _observe_backward)
def _backward_cases() -> Cases:
    rng = np.random.default_rng(0)

    def case(*sizes: int, vocab: int = 4, zeros: bool = False) -> Arguments:
        probability, successor = [], []
        for here, after in zip(sizes[:-1], sizes[1:], strict=True):
            weights = rng.random((here, vocab)) + 0.1
            following = rng.integers(0, after, (here, vocab))
            if zeros:
                weights[:, 1], following[:, 1] = 0.0, 0
            probability.append(weights / weights.sum(1, keepdims=True))
            successor.append(following)
        final = rng.normal(size=sizes[-1])
        return {"final": final, "probability": probability, "successor": successor}

    return {
        "three words": case(1, 2, 3, 5),
        "words with probability 0": case(1, 3, 3, 4, zeros=True),
        "equally many states at each position": case(3, 3, 3),
        "one word": case(1, 4),
        "a finished text": case(3),
    }


def _group_cases() -> Cases:
    groups = {
        "two alternating groups": [0, 1, 0, 1, 0, 1],
        "one group": [0, 0, 0, 0],
        "groups of different sizes": [2, 0, 2, 0, 2, 2, 0],
        "a large group number": [70, 3, 3, 70, 70],
        "pairs": [0, 0, 1, 1],
    }
    cases = {label: {"group": torch.tensor(group)} for label, group in groups.items()}
    for case, draws in zip(cases.values(), map(Draws, range(5)), strict=True):
        case["rewards"] = draws.normal(len(case["group"]))
    equal = {"rewards": torch.tensor([0.5] * 7 + [1, 3]), "group": torch.tensor([0] * 7 + [1, 1])}
    return cases | {"a group of equal rewards": equal}


_rloo_advantages = make_exercise(rloo_advantages, _group_cases)


@exercise(grpo_advantages)
def _grpo_cases() -> Cases:
    cases = _group_cases()
    ordinary = cases["two alternating groups"]
    return cases | {
        "a group of one": {"rewards": torch.tensor([1.0, 2, 5]), "group": torch.tensor([0, 0, 1])},
        "nearly equal rewards": ordinary | {"rewards": 1e-3 * ordinary["rewards"]},
        "large eps": ordinary | {"eps": 0.5},
        "normalize_std=False": ordinary | {"normalize_std": False},
    }


@exercise(gradient_cosine)
def _cosine_cases() -> Cases:
    def case(batch: int, n: int, seed: int, parameters: int = 5) -> Arguments:
        return draw(gradient_cosine, {"batch": batch, "parameters": parameters}, seed, {"n": n})

    rows = case(6, 2, 5)
    factors = torch.tensor([10.0, 1, 1, 5, 0.1, 1])[:, None]
    return {
        "batches of 2": case(6, 2, 0),
        "batches of 3": case(9, 3, 1, 4),
        "an incomplete batch at the end": case(8, 3, 2),
        "a single batch": case(4, 4, 3),
        "batches of 1": case(3, 1, 4),
        "gradients of different lengths": rows | {"gradients": factors * rows["gradients"]},
    }


def _observe_calibration(fn: Answer, **arguments: Any) -> Any:
    found = fn(**arguments)
    columns = dict(zip(("predicted", "observed", "count"), found, strict=True))
    return columns | {"count": columns["count"].double()}


@exercise(calibration_bins, _observe_calibration)
def _calibration_cases() -> Cases:
    draws = Draws(2)

    def case(pairs: int, n_bins: int, scale: float = 2.0) -> Arguments:
        gaps = scale * draws.normal(pairs)
        outcomes = draws.uniform(pairs) < (gaps / 2).sigmoid()
        return {"gaps": gaps, "outcomes": outcomes, "n_bins": n_bins}

    return {
        "60 pairs, 5 bins": case(60, 5),
        "pairs that don't divide evenly into bins": case(17, 4),
        "one bin": case(9, 1),
        "a confident judge": case(40, 4, scale=8.0),
        "as many bins as pairs": case(5, 5),
    }


def _observe_best_of_n(fn: Answer, **arguments: Any) -> Any:
    found = fn(**arguments).double()
    # the smallest weights are far below what is compared
    return {
        "weights": found,
        "largest weights, times the number of samples": found.amax(-1) * found.shape[-1],
        "sum of each row": found.sum(-1),
    }


_best_of_n = make_exercise(best_of_n_weights, observe=_observe_best_of_n)


def _observe_lora(build: Answer, shape: list[int], **settings: Any) -> dict[str, Any]:
    weight = Draws(shape[0]).normal(*shape)
    before = weight.clone()
    adapter = build(weight=weight, generator=torch.Generator().manual_seed(0), **settings)
    facts = {"A": adapter.A.detach().clone(), "B": adapter.B.detach().clone()}
    if facts["B"].shape[-1] != weight.shape[-1]:
        return facts
    if not facts["A"].any() and facts["B"].any():  # one mistake, with any noise
        return facts | {"B": "not 0"}
    facts["the initial weight"] = adapter(weight.clone()).detach()
    with torch.no_grad():
        adapter.B.copy_(Draws(1).normal(*adapter.B.shape))
    changed = adapter(weight)
    facts |= {
        "delta": adapter.delta().detach(),
        "the weight plus its change": changed.detach(),
        "the weight itself afterwards": weight.clone(),
    }
    adapter.merged = before + 1
    facts["with a merged weight, gradients on"] = adapter(before.clone()).detach()
    with torch.no_grad():
        facts["with a merged weight, gradients off"] = adapter(before.clone())
    adapter.merged, adapter.enabled = None, False
    facts["the weight while disabled"] = adapter(before.clone()).detach()
    (changed * Draws(2).normal(*changed.shape)).sum().backward()
    for name, factor in (("A", adapter.A), ("B", adapter.B)):
        facts[f"gradient of {name}"] = torch.zeros(1) if factor.grad is None else factor.grad
    return facts


_lora = make_exercise(LoRALinear, observe=_observe_lora)
