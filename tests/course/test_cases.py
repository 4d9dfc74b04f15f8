"""Arguments drawn from annotations."""

import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.course.cases import draw, half_precision, standard_cases

SIZES = {"batch": 2, "gen": 3, "d_vocab": 5}


def example(
    logits: Float[Tensor, "batch gen d_vocab"],
    tokens: Int[Tensor, "batch gen"],
    coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """A function to draw arguments for."""
    return logits.sum()


def two_inputs(
    logits: Float[Tensor, "batch gen d_vocab"],
    values: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """An example with two tensors that a mask covers."""
    return logits.sum()


def test_shapes_and_kinds_follow_the_annotation() -> None:
    drawn = draw(example, SIZES, seed=0, given={"coef": 0.5}, optional=("mask",))
    assert list(drawn) == ["logits", "tokens", "coef", "mask"]
    assert drawn["logits"].shape == (2, 3, 5) and drawn["logits"].dtype == torch.float32
    assert (
        drawn["tokens"].shape == (2, 3) and 0 <= drawn["tokens"].min() <= drawn["tokens"].max() < 5
    )
    assert drawn["mask"].dtype == torch.bool


def test_masks_are_true_up_to_a_length_and_one_row_is_whole() -> None:
    for seed in range(20):
        mask = draw(example, SIZES, seed, {"coef": 0.5}, ("mask",))["mask"]
        assert mask[0].all() and mask[:, 0].all()
        assert not (mask[:, 1:] & ~mask[:, :-1]).any()
        assert not mask[1].all()


def test_draw_raises_without_a_shape() -> None:
    with pytest.raises(ValueError, match="coef has no shape"):
        draw(example, SIZES, 0)


def test_standard_cases_cover_sizes_masks_and_extremes() -> None:
    cases = standard_cases(example, large={"logits": 1e3}, coef=1.0)
    assert list(cases) == [
        "ordinary",
        "other sizes",
        "batch of 1",
        "one token",
        "masked",
        "large numbers",
    ]
    assert cases["batch of 1"]["logits"].shape == (1, 4, 5)
    assert cases["one token"]["logits"].shape == (3, 1, 5)
    assert "mask" not in cases["ordinary"]
    assert cases["large numbers"]["logits"].abs().max() > 1000


def test_padding_is_spoiled_and_nothing_else() -> None:
    cases = standard_cases(two_inputs, spoil=("logits", "values"))
    spoiled = cases["nan and inf at padding"]
    padding = ~spoiled["mask"]
    assert padding.any()
    assert torch.equal(spoiled["logits"].isnan(), padding[..., None].expand(3, 4, 5))
    assert torch.equal(spoiled["values"].isposinf(), padding)
    assert spoiled["values"][~padding].isfinite().all()


def test_half_precision_is_of_the_arguments_that_are_named() -> None:
    arguments = half_precision(two_inputs, "values")["half precision"]
    assert arguments["values"].dtype == torch.float16
    assert arguments["logits"].dtype == torch.float32
