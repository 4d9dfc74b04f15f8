"""Amnesic probing: a label erased at every position, and what is decided and read without it."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional import Interval, bootstrap_interval, bootstrap_means
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.device import where_exact
from rlhf_lab.probes.direction import fit_direction
from rlhf_lab.probes.direction_probe import Split, is_right
from rlhf_lab.probes.erasure import Eraser
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.training.capture import InterventionFn, Where, capture_activations


class Decided(NamedTuple):
    """Decisions and predictions of held-out sequences at one position."""

    lean: Float[Tensor, " judged"]  # logit(word) - logit(other), in nats
    positive: Bool[Tensor, " judged"]  # the label
    read_there: Bool[Tensor, " judged"]  # True if a probe fitted at the site predicts the label
    read_last: Bool[Tensor, " judged"]  # the same after the last block


class Forgotten(NamedTuple):
    """Effects of an erasure, each with its bootstrap interval over sequences."""

    gap: Interval  # mean lean of positive minus negative sequences, as a fraction of before
    flipped: Interval  # fraction of sequences that decide for the other word
    read_there: Interval  # accuracy of a probe fitted at the site
    read_last: Interval  # the same after the last block


@torch.no_grad()
def decide_without(
    policy: TransformerWithValueHead,
    tokens: Int[Tensor, "batch seq"],
    labels: Bool[Tensor, " batch"],
    site: str,
    pos: int,
    words: tuple[int, int],
    eraser: Eraser | None = None,
) -> Decided:
    """Run the policy with a label erased at the site, and measure its decision at a position.

    The state of each position goes through its own eraser (None: no change), fitted to other
    sequences. Fisher's discriminant is fitted to the first half of the sequences, after the erasure
    and after the last block; it and the policy's own lean are tested on the second half.

    Args:
        site: a residual hook point, such as "blocks.0.hook_resid_post".
        words: the two tokens to compare.

    Raises ValueError unless both labels occur in the first half.

    Source: Elazar et al. 2021, arXiv 2006.00995
    """
    erase = lambda act, hook: eraser.erase_sequences(act)
    last, half = f"blocks.{len(policy.base_model.blocks) - 1}.hook_resid_post", len(labels) // 2
    with policy.base_model.hooks(fwd_hooks=[(site, erase)] * (eraser is not None)):
        acts = capture_activations(policy, tokens[:, : pos + 1], [site, last, "logits"], pos)
    lean = acts["logits"][:, words[0]] - acts["logits"][:, words[1]]
    right = [_refit(acts[name], labels, half) for name in (site, last)]
    return Decided(lean[half:].cpu(), labels[half:].cpu(), *right)


def _refit(
    x: Float[Tensor, "batch d_model"], labels: Bool[Tensor, " batch"], half: int
) -> Bool[Tensor, " judged"]:
    x = where_exact(x)
    labels = labels.to(x.device)
    split = Split(x[:half], labels[:half], x[half:], labels[half:])
    return is_right(split, fit_direction(split.x, split.labels, "lda")).cpu()


def forgotten(without: Decided, before: Decided) -> Forgotten:
    """Compare the decisions after an erasure with those before it."""
    columns = without.lean, before.lean, before.positive
    gap = bootstrap_interval(*columns, statistic=_share_left, resamples=RESAMPLES)
    flipped = (without.lean > 0) != (before.lean > 0)
    others = (
        bootstrap_means(hit.double(), resamples=RESAMPLES)
        for hit in (flipped, without.read_there, without.read_last)
    )
    return Forgotten(gap, *others)


def _share_left(
    lean: Float[Tensor, " n"], before: Float[Tensor, " n"], positive: Bool[Tensor, " n"]
) -> Float[Tensor, ""]:
    now, then = (x[positive].mean() - x[~positive].mean() for x in (lean, before))
    return now / then


def erasing(eraser: Eraser) -> InterventionFn:
    """An intervention that erases in training, for `trainer.intervene`.

    Sequences begin at position 0. With a KV cache, prompts must have at least two tokens and one
    length in all rows.
    """
    at = 0

    def erase(act: Tensor, where: Where) -> Tensor:
        nonlocal at
        start = at if act.shape[1] == 1 else 0
        at = start + act.shape[1]
        return eraser.erase_sequences(act, start)

    return erase
