"""Lesson 05, the objective: entropy and the entropy bonus."""

import torch

from rlhf_lab.course.cases import filtered, standard_cases, with_log_probs
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import calc_entropy_bonus, entropy_per_token


def _many_words() -> Case:
    """A vocabulary in which what is added to each probability counts a thousand times."""
    generator = torch.Generator().manual_seed(11)
    return Case("1,000 words", {"logprobs": torch.randn(2, 3, 1000, generator=generator)})


_exercise = exercise_from("entropy.toml")

EXERCISES = (
    _exercise(
        entropy_per_token,
        cases=lambda: with_log_probs(
            (
                *standard_cases(entropy_per_token, large={"logprobs": 1e3}),
                filtered(entropy_per_token, "logprobs"),
                _many_words(),
            )
        ),
    ),
    _exercise(
        calc_entropy_bonus,
        cases=lambda: standard_cases(
            calc_entropy_bonus, large={"entropy": 1e3}, spoil=("entropy",), ent_coef=0.4
        ),
    ),
)
