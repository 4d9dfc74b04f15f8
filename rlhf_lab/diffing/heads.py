"""Ablation and patching of attention heads: what they read is blanked, averaged or exchanged."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError


def ablate_heads(
    z: Float[Tensor, "batch seq head d_head"],
    heads: list[int],
    positions: slice,
    to: Literal["zero", "mean"] = "zero",
) -> Float[Tensor, "batch seq head d_head"]:
    """Take what some heads have read away from some positions: ablation.

    1. Copy z, which belongs to the caller.
    2. In the copy, overwrite these heads at these positions: with 0, or with the mean over the
       batch, of each position, head and entry by itself.

    Raises ConfigError where `to` is neither "zero" nor "mean".

    (zero: Michel et al. 2019, arXiv 1905.10650; mean: Wang et al. 2022, arXiv 2211.00593)
    """
    if to not in ("zero", "mean"):
        raise ConfigError(f"to={to!r} is unknown; choose zero or mean.")
    ablated = z.clone()
    ablated[:, positions, heads] = 0.0 if to == "zero" else z[:, positions, heads].mean(0)
    return ablated


def patch_heads(
    z: Float[Tensor, "batch seq head d_head"],
    donor: Float[Tensor, "batch seq head d_head"],
    heads: list[int],
    positions: slice,
) -> Float[Tensor, "batch seq head d_head"]:
    """Replace the outputs z of some heads by those of another run.

    1. Copy z, because the caller may still need the original.
    2. In the copy, overwrite these heads at these positions with the donor's.

    Row i of z and row i of donor belong to a pair of texts. If the positions differ from row to
    row, use `patch_hook`.

    (Vig et al. 2020; Heimersheim and Nanda 2024, arXiv 2404.15255)
    """
    patched = z.clone()
    patched[:, positions, heads] = donor[:, positions, heads]
    return patched
