"""Lesson 00, start: sums and means that respect a mask."""

import torch

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.functional import masked_mean, sequence_sum

LESSON = "00_start"
MASK_MULTIPLIED = "this multiplies by the mask, and 0 * nan is nan: put 0 there instead"


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
        Case("nan where the mask is False", {"x": x.masked_fill(~mask, torch.nan), "mask": mask}),
        Case("large numbers", {"x": x * 1e30}),
    )


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=sequence_sum,
        difficulty=1,
        minutes=5,
        hints=(
            "A masked token must not count, whatever number stands there: put 0 in its place.",
            "x is [batch gen] and the result [batch]: the last axis goes away.",
            "zero_masked(x, mask) puts the zeros in; then .sum(dim=-1).",
        ),
        cases=lambda: standard_cases(sequence_sum, large={"x": 1e30}, spoil=("x",)),
        gradients=("x",),
        slips=(
            Slip("the mask is not used", {"x), mask).sum": "x), None).sum"}),
            Slip(
                "this sums over the batch, not over the tokens of each sequence",
                {".sum(dim=-1)": ".sum(dim=0)"},
            ),
            Slip("this is the mean of each sequence, not its sum", {".sum(dim": ".mean(dim"}),
            Slip(
                MASK_MULTIPLIED,
                {"zero_masked(at_least_float32(x), mask)": "(x if mask is None else x * mask)"},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=masked_mean,
        difficulty=2,
        minutes=10,
        hints=(
            "A mean is a sum over a count. Which entries belong in the sum, and which are counted?",
            "total and count both lose the axes in dim; without a mask every entry counts. A count "
            "of 0 must give 0.0, so divide by 1 there.",
            "total = zero_masked(x, mask).sum(dim=dim); count = mask.sum(dim=dim), or the "
            "denominator if there is one; total / count.clamp(min=1) when counting.",
        ),
        cases=_masked_mean_cases,
        gradients=("x",),
        slips=(
            Slip(
                "the mask is not used",
                {"zero_masked(x, mask)": "x", "_real(x, mask).sum": "torch.ones_like(x).sum"},
            ),
            Slip(
                "this divides by all entries, the masked ones included",
                {"_real(x, mask).sum": "torch.ones_like(x).sum"},
            ),
            Slip(
                "this divides the sum of all entries, the masked ones included",
                {"zero_masked(x, mask)": "x"},
            ),
            Slip(MASK_MULTIPLIED, {"zero_masked(x, mask)": "(x * _real(x, mask))"}),
            Slip(
                "this is the sum: divide it by the count",
                {"total / count.masked_fill(count == 0, 1.0)": "total"},
            ),
            Slip(
                "a mean over nothing divides 0 by 0",
                {"count.masked_fill(count == 0, 1.0)": "count"},
            ),
            Slip(
                "the denominator is not used",
                {"if denominator is None:\n": "if True:\n"},
            ),
        ),
    ),
)
