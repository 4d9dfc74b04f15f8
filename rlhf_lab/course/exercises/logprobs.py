"""Lesson 05, the objective: normalized rewards and log-probabilities of the sampled tokens."""

import torch

from rlhf_lab.course.cases import draw, half_precision, standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import get_logprobs, normalize_reward


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


_exercise = exercise_from("logprobs.toml")

EXERCISES = (
    _exercise(normalize_reward, cases=_normalize_cases),
    _exercise(get_logprobs, cases=_logprob_cases),
)
