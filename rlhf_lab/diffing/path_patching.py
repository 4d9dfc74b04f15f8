"""Path patching: the change of one part, let through to the logits along chosen paths alone."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.patch_places import (
    WRITTEN,
    PatchPlace,
    Side,
    language_sides,
    refuse_unlike_sides,
    word_ids,
)
from rlhf_lab.diffing.patching import (
    Hook,
    Patched,
    captured_at,
    hooks_to,
    logit_difference,
    rows_of,
)
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.training.capture import ROWS_AT_ONCE


def patch_path(
    receiver: Side,
    donor: Side,
    sender: PatchPlace,
    through: Sequence[PatchPlace],
    pos: int,
    words: tuple[int | str, int | str],
) -> Patched:
    """Let a change of the sender reach the logits along chosen paths alone.

    1. Run the receiver with the donor's activation at the sender, every head's z and every MLP held
       at the receiver's own, but for those that the path goes through; keep what these become.
    2. Run the receiver with that in their places.

    `through` the residual stream behind the last block is the sender's direct path.

    Raises:
        ConfigError: see `patch_activations`; or no place to go through.

    (Wang et al. 2022, arXiv 2211.00593; Goldowsky-Dill et al. 2023, arXiv 2304.05969)
    """
    if not through:
        raise ConfigError("through is empty; give at least one place, such as the last residual.")
    receiver, donor = language_sides(receiver, donor)
    refuse_unlike_sides(receiver, donor, [sender, *through], pos)
    words = word_ids(receiver.model, words)
    found = []
    for rows in torch.arange(len(receiver.tokens)).split(ROWS_AT_ONCE):
        own, other = rows_of(receiver, rows), rows_of(donor, rows)
        held = _held(own.model, through)
        hooks = [
            h for e in zip(held, captured_at(own, held), strict=True) for h in hooks_to(own, *e)
        ]
        hooks += hooks_to(own, sender, *captured_at(other, [sender]))
        reached = captured_at(own, through, hooks)
        last = _all_hooks(own, through, reached)
        ends = [logit_difference(side, pos, words) for side in (own, other)]
        found.append(torch.stack([*ends, logit_difference(own, pos, words, last)]))
    start, end, patched = torch.cat(found, dim=1)
    return Patched(["path"], start, end, patched[None])


def _all_hooks(
    side: Side, places: Sequence[PatchPlace], values: Sequence[Float[Tensor, "batch ..."]]
) -> list[Hook]:
    each = zip(places, values, strict=True)
    return [hook for place, value in each for hook in hooks_to(side, place, value)]


def _held(model: HookedModel, through: Sequence[PatchPlace]) -> list[PatchPlace]:
    """Every head's z and every MLP, but for those that a path goes through."""
    held = []
    for layer in range(model.cfg.n_layers):
        z, written, mlp = (f"blocks.{layer}.{x}" for x in ("attn.hook_z", WRITTEN, "hook_mlp_out"))
        free = {place.head for place in through if place.site in (z, written)}
        heads = [] if None in free else range(model.cfg.n_heads)
        held += [PatchPlace(z, head) for head in heads if head not in free]
        held += [PatchPlace(mlp)] * all(place.site != mlp for place in through)
    return held
