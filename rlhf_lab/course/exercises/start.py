"""Lesson 00, start: sums and means that respect a mask."""

import torch

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import masked_mean, sequence_sum


def _masked_mean_cases() -> tuple[Case, ...]:
    """Over everything and along an axis, with and without a mask, and over nothing."""
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


_exercise = exercise_from("start.toml")

EXERCISES = (
    _exercise(sequence_sum, cases=_sum_cases),
    _exercise(masked_mean, cases=_masked_mean_cases),
)
