"""Activation patching: activations of one forward put into another, by site, head and position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.patch_places import (
    WRITTEN,
    PatchPlace,
    Side,
    language_sides,
    places_by_name,
    refuse_unlike_sides,
    word_ids,
    writes,
)
from rlhf_lab.diffing.stages import Tick, untold
from rlhf_lab.functional import Interval, recovered_fraction
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.models.padding import rotate_padding, run_left_padded
from rlhf_lab.training.capture import ROWS_AT_ONCE, SQUARE

Hook = tuple[str, Callable[[Tensor, HookPoint], Tensor | None]]


@dataclass(frozen=True)
class Patched:
    """Logit differences of the receiver, with an activation of the donor at each place in turn.

    Args:
        names: of the places.
        start: the receiver's own.
        end: the donor's.
        patched: with each place patched.
    """

    names: list[str]
    start: Float[Tensor, " batch"]
    end: Float[Tensor, " batch"]
    patched: Float[Tensor, "place batch"]

    def fractions(self) -> dict[str, Interval]:
        """The share of the way from start to end that each place brings, with its interval."""
        rows = zip(self.names, self.patched, strict=True)
        return {name: recovered_fraction(self.end, self.start, row) for name, row in rows}


def patch_hook(
    source: Float[Tensor, "batch ..."],
    head: int | None = None,
    positions: Bool[Tensor, "batch seq"] | None = None,
) -> Callable[[Tensor, HookPoint], Tensor]:
    """Make a hook that puts another forward's activation in place of what it is given.

    Args:
        source: of one site; `[batch head query key]` for patterns and scores.
        head: whose entries alone; all when None.
        positions: True where it is replaced; everywhere when None.
    """

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        square = hook.name.endswith(SQUARE)
        rest = activation.ndim - 2
        chosen = torch.ones(activation.shape[0], activation.shape[2 if square else 1]).bool()
        chosen = (chosen if positions is None else positions).to(activation.device)
        where = chosen[:, None, :, None] if square else chosen.reshape(*chosen.shape, *[1] * rest)
        if head is not None:
            axis = 1 if square else 2
            of_head = torch.arange(activation.shape[axis], device=activation.device) == head
            where = where & of_head.reshape([-1 if i == axis else 1 for i in range(rest + 2)])
        return torch.where(where, source.to(activation), activation)

    return put


def patch_activations(
    receiver: Side,
    donor: Side,
    places: dict[str, PatchPlace | str],
    pos: int,
    words: tuple[int | str, int | str],
    tick: Tick = untold,
) -> Patched:
    """Put the donor's activation at each place in turn into the receiver, and read its logits.

    1. Run both, and keep what the donor has at the places.
    2. Run the receiver once for each place, with the donor's activation there.
    3. Read logit(words[0]) - logit(words[1]) at `pos`.

    Sides with two models and one text ask what training changed; with one model and two texts, what
    carries the difference of the texts. From the base into the tuned model, it is what the model
    needs; the other way round, what suffices.

    Args:
        places: by name; a hook point's name alone stands for all of its activation.
        words: two single tokens, as text or as ids.
        tick: called behind every patched forward.

    Raises:
        ConfigError: texts of unequal shape, a site, head or position that is not there, or models
            whose heads' shares cannot be told apart.

    (Vig et al. 2020; Meng et al. 2022; Heimersheim and Nanda 2024, arXiv 2404.15255)
    """
    receiver, donor = language_sides(receiver, donor)
    chosen = list(places_by_name(places).values())
    refuse_unlike_sides(receiver, donor, chosen, pos)
    words = word_ids(receiver.model, words)
    found = []
    for rows in torch.arange(len(receiver.tokens)).split(ROWS_AT_ONCE):
        own, other = rows_of(receiver, rows), rows_of(donor, rows)
        theirs = captured_at(other, chosen)
        hooks = [hooks_to(own, *each) for each in zip(chosen, theirs, strict=True)]
        seen = [logit_difference(side, pos, words) for side in (own, other)]
        for each in hooks:
            seen.append(logit_difference(own, pos, words, each))
            tick()
        found.append(torch.stack(seen))
    start, end, *patched = torch.cat(found, dim=1)
    return Patched(list(places), start, end, torch.stack(patched))


def rows_of(side: Side, rows: Int[Tensor, " rows"]) -> Side:
    """Some rows of a side, on its model's device."""
    device = next(side.model.parameters()).device
    mask = torch.ones_like(side.tokens, dtype=torch.bool) if side.mask is None else side.mask
    return Side(side.model, side.tokens[rows].to(device), mask[rows].to(device))


@torch.no_grad()
def _run(side: Side, hooks: Sequence[Hook]) -> Float[Tensor, "batch seq d_vocab"]:
    """Logits of a forward with hooks, which see padding moved to the right."""
    run = lambda tokens: (side.model(tokens, attention_mask=torch.ones_like(tokens)),)
    with side.model.hooks(fwd_hooks=list(hooks)):
        return run_left_padded(run, side.tokens, side.mask)[0]


def logit_difference(
    side: Side, pos: int, words: tuple[int, int], hooks: Sequence[Hook] = ()
) -> Float[Tensor, " batch"]:
    """logit(words[0]) - logit(words[1]) at one position of a forward with hooks."""
    logits = exact(_run(side, hooks)[:, pos])
    return logits[:, words[0]] - logits[:, words[1]]


def captured_at(
    side: Side, places: Sequence[PatchPlace], hooks: Sequence[Hook] = ()
) -> list[Float[Tensor, "batch ..."]]:
    """What a forward has at each place, with padding on the right: of one head that writes, its
    share alone.
    """
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint) -> None:
        kept[hook.name] = activation.detach()

    reads = dict.fromkeys(_z_of(place) if writes(place) else place.site for place in places)
    _run(side, [*hooks, *((site, keep) for site in reads)])
    return [
        _written(side.model, place, kept[_z_of(place)]) if writes(place) else kept[place.site]
        for place in places
    ]


def hooks_to(side: Side, place: PatchPlace, value: Float[Tensor, "batch ..."]) -> list[Hook]:
    """Hooks that put a value at a place, with padding on the right."""
    chosen = torch.ones_like(side.mask) if place.positions is None else ~torch.ones_like(side.mask)
    if place.positions is not None:
        chosen[:, place.columns] = True
        chosen = rotate_padding(chosen, side.mask, "right")
    if not writes(place):
        return [(place.site, patch_hook(value, place.head, chosen))]
    now: list[Tensor] = []

    def keep(z: Tensor, hook: HookPoint) -> None:
        now[:] = [_written(side.model, place, z)]

    def exchange(written: Tensor, hook: HookPoint) -> Tensor:
        changed = written + (value - now[0]).to(written)
        return torch.where(chosen[:, :, None], changed, written)

    return [(_z_of(place), keep), (place.site, exchange)]


def _z_of(place: PatchPlace) -> str:
    return f"{place.site.removesuffix(WRITTEN)}attn.hook_z"


def _written(
    model: HookedModel, place: PatchPlace, z: Float[Tensor, "batch seq head d_head"]
) -> Float[Tensor, "batch seq d_model"]:
    """What one head adds to the residual stream."""
    layer = int(place.site.split(".")[1])
    return z[:, :, place.head] @ model.blocks[layer].attn.W_O[place.head]
