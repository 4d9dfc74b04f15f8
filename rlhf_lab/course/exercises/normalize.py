"""Lesson 03, rewards and credit: normalized rewards."""

import torch

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import normalize_reward


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


_exercise = exercise_from("normalize.toml")

EXERCISES = (_exercise(normalize_reward, cases=_normalize_cases),)
