"""Lesson 01, the policy and its hooks: draw a token, write without a cache, score what is there."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import half_precision, standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.functional import get_logprobs
from rlhf_lab.sampling import draw_token, sample_without_cache


def _draw_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def drawn(batch: int, width: int) -> dict[str, torch.Tensor]:
        logits = 2 * torch.randn(batch, width, generator=generator)
        noise = torch.rand(batch, generator=generator)
        return {"logprobs": logits.log_softmax(-1), "noise": noise}

    def by_hand(probs: list[float], *noise: float) -> dict[str, torch.Tensor]:
        logprobs = torch.tensor(probs).log().expand(len(noise), len(probs))
        return {"logprobs": logprobs, "noise": torch.tensor(noise)}

    shares = [0.1, 0.4, 0.3, 0.2]
    return (
        Case("ordinary", drawn(6, 5)),
        Case("other sizes", drawn(9, 12)),
        Case("batch of 1", drawn(1, 5)),
        Case("one distribution, several numbers", by_hand(shares, 0.05, 0.3, 0.55, 0.95)),
        Case("a token of probability 0 in front, noise 0", by_hand([0.0, 0.5, 0.5], 0.0, 0.3, 0.7)),
        Case("tokens that cannot be said", by_hand([0.5, 0.0, 0.0, 0.5, 0.0], 0.2, 0.7, 0.999)),
        Case(
            "probabilities that add up to 0.9",
            by_hand([0.9 * p for p in shares], 0.09, 0.48, 0.79, 0.95),
        ),
    )


def _logprob_cases() -> tuple[Case, ...]:
    cold = standard_cases(
        get_logprobs,
        sizes={"seq": 7},
        one_token={"seq": 4},
        large={"logits": 1e3},
        prefix_len=3,
        temperature=0.7,
    )
    plain = standard_cases(get_logprobs, sizes={"seq": 5}, one_token={"seq": 2})
    return (*cold, *plain, half_precision(get_logprobs, "logits", sizes={"seq": 7}, prefix_len=3))


def _write_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, batch: int, prefix: int, gen: int, temperature: float) -> Case:
        prompts = torch.randint(TOY_VOCABULARY, (batch, prefix), generator=generator)
        noise = torch.rand(gen, batch, generator=generator)
        arguments = {"prompts": prompts, "noise": noise, "temperature": temperature}
        return Case(label, arguments)

    return (
        case("ordinary", 4, 4, 6, 1.0),
        case("cold", 5, 3, 7, 0.5),
        case("hot", 5, 3, 7, 3.0),
        case("batch of 1", 1, 4, 5, 1.5),
        case("one step", 6, 2, 1, 1.5),
        case("a prompt of one token", 4, 1, 6, 1.5),
        case("nearly greedy", 3, 4, 6, 0.01),
    )


def _observe_writing(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return fn(toy_transformer(), **arguments)


_exercise = exercise_from("policy.toml")

EXERCISES = (
    _exercise(draw_token, cases=_draw_cases),
    _exercise(sample_without_cache, cases=_write_cases, observe=_observe_writing),
    _exercise(get_logprobs, cases=_logprob_cases),
)
