"""LEACE: erasure of a label from activations, so that no linear reader can predict it."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models.device import exact


class Eraser(NamedTuple):
    """An affine map that takes a label out of activations."""

    mean: Float[Tensor, "*site d_model"]  # of the activations that it was fitted to
    axis: Float[Tensor, "*site d_model"]  # difference of the class means
    reader: Float[Tensor, "*site d_model"]  # the best linear probe, with reader . axis = 1

    def erase(self, x: Float[Tensor, "*site n d_model"]) -> Float[Tensor, "*site n d_model"]:
        """x - ((x - mean) . reader) axis, in float64."""
        x = exact(x)
        read = ((x - self.mean[..., None, :]) @ self.reader[..., None])[..., 0]
        return x - read[..., None] * self.axis[..., None, :]

    def erase_sequences(
        self, x: Float[Tensor, "batch seq d_model"], start: int = 0
    ) -> Float[Tensor, "batch seq d_model"]:
        """Erase from sequences by an eraser with a row per position, in the precision of x.

        Args:
            start: the position of the first state of x; states after the eraser's last position
                are not changed.
        """
        there = Eraser(*(part[start : start + x.shape[1]].to(x.device) for part in self))
        within = len(there.mean)
        erased = there.erase(x[:, :within].transpose(0, 1)).transpose(0, 1)
        return torch.cat([erased.to(x), x[:, within:]], dim=1)


def orthogonal_eraser(direction: Float[Tensor, "*site d_model"]) -> Eraser:
    """The ablation of a direction of length 1 as an eraser: x - (x . d) d."""
    return Eraser(torch.zeros_like(exact(direction)), exact(direction), exact(direction))


def fit_leace(
    x: Float[Tensor, "*site n d_model"], labels: Bool[Tensor, " n"], ridge: float = 1e-4
) -> Eraser:
    """Find the smallest change of activations that makes both classes' means equal.

    1. Take the difference of the class means, and the covariance of all activations. Add `ridge`
       times its mean variance, because a token that never changes has no variance.
    2. The reader is the difference divided by the covariance, scaled to read the difference as 1.
    3. If the means are equal there is nothing to erase, and the reader is 0.

    Difference-of-means ablation removes how far activations *vary along* the same axis, which
    leaves labels that correlate with other directions. LEACE removes what a linear reader *reads*.

    r(x) = x - (x - mu)' w d, d = mu+ - mu-, w = S^-1 d / (d' S^-1 d)
    (Belrose et al. 2023, arXiv 2306.03819, theorem 4.3, for one binary label)
    """
    x = exact(x)
    mean = x.mean(-2)
    axis = x[..., labels.bool(), :].mean(-2) - x[..., ~labels.bool(), :].mean(-2)
    centered = x - mean[..., None, :]
    covariance = centered.mT @ centered / x.shape[-2]
    variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    covariance = covariance + ridge * variance[..., None, None] * identity
    factor = torch.linalg.cholesky(covariance)
    reader = torch.cholesky_solve(axis[..., None], factor)[..., 0]
    read = (reader * axis).sum(-1, keepdim=True)
    there = axis.norm(dim=-1, keepdim=True) > 1e-9
    return Eraser(mean, axis, torch.where(there, reader / torch.where(there, read, 1.0), 0.0))
