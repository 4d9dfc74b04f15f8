"""Directions in the residual stream: fits to a label, projection, ablation, and control labels."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models.device import exact

Method = Literal["mean", "lda"]


class Fitted(NamedTuple):
    """A direction of length 1 per site, and the projection above which the label is True."""

    direction: Float[Tensor, "*site d_model"]
    threshold: Float[Tensor, "*site"]


def fit_direction(
    x: Float[Tensor, "*site n d_model"],
    labels: Bool[Tensor, " n"],
    method: Method = "mean",
    ridge: float = 1e-4,
) -> Fitted:
    """Find the direction that separates two classes, independently at each site.

    1. "mean": take the difference of the class means.
    2. "lda": divide this difference by the covariance within the classes, plus `ridge` times its
       mean variance. This is the best direction for two Gaussians with the same covariance.
    3. Scale the direction to length 1, and put the threshold halfway between the class means.
    4. At a site with the same activation in every text, the direction is 0. For this, clamp the
       mean variance of step 2 and the length of step 3 to at least 1e-12.

    Raises ValueError unless both labels occur, and there is one for each of the n activations.

    d = mu+ - mu-  (Marks and Tegmark 2024, arXiv 2310.06824);  d = S^-1 (mu+ - mu-)  (Fisher 1936)
    """
    if x.shape[-2] != len(labels) or labels.dtype != torch.bool:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, labels {tuple(labels.shape)} of {labels.dtype}. Pass "
            "activations at one position, [n d_model], and n labels that are True or False."
        )
    if bool(labels.all()) or not bool(labels.any()):
        raise ValueError(f"labels are all {bool(labels[0])}. Use sequences of both classes.")
    x = x.double()  # the covariance's inverse amplifies float32's rounding
    positive, negative = x[..., labels, :].mean(-2), x[..., ~labels, :].mean(-2)
    direction = positive - negative
    if method == "lda":
        means = torch.where(labels[:, None], positive[..., None, :], negative[..., None, :])
        centered = x - means
        covariance = centered.mT @ centered / len(labels)
        variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
        identity = torch.eye(x.shape[-1], dtype=variance.dtype, device=x.device)
        covariance = covariance + ridge * variance[..., None, None] * identity
        factor = torch.linalg.cholesky(covariance)
        direction = torch.cholesky_solve(direction[..., None], factor)[..., 0]
    direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    threshold = ((positive + negative) / 2 * direction).sum(-1)
    return Fitted(direction, threshold)


def fit_each_site(
    x: Float[Tensor, "site *pos n d_model"], labels: Bool[Tensor, " n"], method: Method
) -> Fitted:
    """Apply `fit_direction` to one site after the other, which needs less memory."""
    parts = [fit_direction(one.float(), labels, method) for one in x]
    return Fitted(*(torch.stack(part) for part in zip(*parts, strict=True)))


def project(
    x: Float[Tensor, "*site n d_model"], direction: Float[Tensor, "*site d_model"]
) -> Float[Tensor, "*site n"]:
    """The length of each activation along a direction."""
    x = at_least_float32(x)
    return exact((x @ direction.to(x)[..., None])[..., 0])


def ablate(
    x: Float[Tensor, "*site n d_model"], direction: Float[Tensor, "*site d_model"]
) -> Float[Tensor, "*site n d_model"]:
    """Take a direction of length 1 out of activations: h - (h . d) d.

    Source: Arditi et al. 2024, arXiv 2406.11717, section 2.4.
    """
    along = project(x, direction).to(x.dtype)[..., None]
    return x - along * direction.to(x.dtype)[..., None, :]


def cosine_interval(
    x: Float[Tensor, "site n d_model"],
    first: Float[Tensor, "site n d_model"],
    labels: Bool[Tensor, " n"],
    resamples: int = 400,
) -> Interval:
    """The cosine of the differences of class means of two models, at each site, and its interval.

    The same sequences are drawn of both models' activations, which are of the same text. The cosine
    of a token that is always the same is nan.
    """
    sides = torch.stack([labels, ~labels], 1).double()
    columns = (torch.einsum("snd,nk->nksd", acts.double(), sides) for acts in (x, first))

    def cosine(now: Tensor, before: Tensor, shares: Tensor) -> Float[Tensor, "draw site"]:
        means = (acts / shares[:, :, None, None] for acts in (now, before))
        one, other = (mean[:, 0] - mean[:, 1] for mean in means)
        size = one.norm(dim=-1) * other.norm(dim=-1)
        return (one * other).sum(-1) / torch.where(size > 0, size, torch.nan)

    return bootstrap_means(*columns, sides, statistic=cosine, resamples=resamples)


def control_labels(
    tokens: Int[Tensor, "*shape"], generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "*shape"]:
    """Label every token by its word type alone, at random: the labels of a control task.

    1. Find the different tokens (the word types), and which of them is at each place.
    2. Toss a coin for each type, with the `generator` (of the CPU) and no other random state: it is
       True with probability `share`.
    3. Give each place the label of its type.

    Call this once, on the rows of the fit and of the test, so a word has one label in both. A probe
    can only predict these labels by memorizing words; its accuracy on the real labels minus this
    one is its selectivity. If exactly half of the types were True, labels would predict each other.

    Raises ValueError unless `share` is between 0 and 1.

    Source: Hewitt and Liang 2019, arXiv 1909.03368, section 2

    Args:
        share: the probability of True: that of the real labels.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}. Use a number between 0 and 1, such as 0.5.")
    types, inverse = tokens.unique(return_inverse=True)
    coins = torch.rand(len(types), generator=generator) < share
    return coins.to(tokens.device)[inverse]
