"""Arguments drawn from annotations."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.course.cases import draw, standard_cases

SIZES = {"batch": 2, "gen": 3, "d_vocab": 5}


def two_inputs(
    logits: Float[Tensor, "batch gen d_vocab"],
    values: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """A function to draw arguments for."""
    return logits.sum()


def test_masks_are_true_up_to_a_length_and_one_row_is_whole() -> None:
    for seed in range(20):
        mask = draw(two_inputs, SIZES, seed, optional=("mask",))["mask"]
        assert mask[0].all() and mask[:, 0].all()
        assert not (mask[:, 1:] & ~mask[:, :-1]).any()
        assert not mask[1].all()


def test_padding_is_spoiled_and_nothing_else() -> None:
    cases = standard_cases(two_inputs, spoil=("logits", "values"))
    spoiled = cases["nan and inf at padding"]
    padding = ~spoiled["mask"]
    assert padding.any()
    assert torch.equal(spoiled["logits"].isnan(), padding[..., None].expand(3, 4, 5))
    assert torch.equal(spoiled["values"].isposinf(), padding)
    assert spoiled["values"][~padding].isfinite().all()
