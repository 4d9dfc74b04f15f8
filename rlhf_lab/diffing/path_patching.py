"""Path patching: the change of one component, passed to the logits along chosen paths only."""

from collections.abc import Sequence

import torch

from rlhf_lab.diffing.contrast import Words, make_contrast
from rlhf_lab.diffing.patching import (
    ATTN_OUT,
    Hook,
    Patched,
    PatchPlace,
    Side,
    captured_at,
    hooks_to,
    logit_difference,
    take_rows,
    validate_sides,
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
    words: Words,
) -> Patched:
    """Pass a change of the sender to the logits along chosen paths only.

    1. Run the receiver with the donor's activation at the sender, and with every head's z and every
       MLP fixed at the receiver's values, except those on the path; keep what the path becomes.
    2. Run the receiver with these activations on the path.

    `through` the residual stream after the last block is the sender's direct path.

    Raises:
        ConfigError: If `through` is empty; otherwise as `patch_activations`.

    (Wang et al. 2022, arXiv 2211.00593; Goldowsky-Dill et al. 2023, arXiv 2304.05969)
    """
    if not through:
        raise ConfigError("through is empty. Pass at least one place, such as the last residual.")
    receiver, donor = validate_sides(receiver, donor, [sender, *through], pos)
    contrast, found = make_contrast(receiver.model, words), []
    for rows in torch.arange(len(receiver.tokens)).split(ROWS_AT_ONCE):
        to, source = take_rows(receiver, rows), take_rows(donor, rows)
        fixed = _fixed_places(to.model, through)
        hooks = _hooks_to_all(to, fixed, captured_at(to, fixed))
        hooks += hooks_to(to, sender, *captured_at(source, [sender]))
        last = _hooks_to_all(to, through, captured_at(to, through, hooks))
        ends = [logit_difference(side, pos, contrast) for side in (to, source)]
        found.append(torch.stack([*ends, logit_difference(to, pos, contrast, last)]))
    start, end, patched = torch.cat(found, dim=1)
    return Patched(["path"], start, end, patched[None])


def _hooks_to_all(
    side: Side, places: Sequence[PatchPlace], values: Sequence[torch.Tensor]
) -> list[Hook]:
    each = zip(places, values, strict=True)
    return [hook for place, value in each for hook in hooks_to(side, place, value)]


def _fixed_places(model: HookedModel, through: Sequence[PatchPlace]) -> list[PatchPlace]:
    fixed = []
    for layer in range(model.cfg.n_layers):
        z, out, mlp = (f"blocks.{layer}.{x}" for x in ("attn.hook_z", ATTN_OUT, "hook_mlp_out"))
        free = {place.head for place in through if place.site in (z, out)}
        heads = [] if None in free else range(model.cfg.n_heads)
        fixed += [PatchPlace(z, head) for head in heads if head not in free]
        fixed += [PatchPlace(mlp)] * all(place.site != mlp for place in through)
    return fixed
