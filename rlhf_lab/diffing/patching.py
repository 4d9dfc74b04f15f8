"""Activation patching: activations of one forward put into another, by site, head and position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.stages import Tick, untold
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, recovered_fraction
from rlhf_lab.models.device import exact
from rlhf_lab.models.padding import rotate_padding, run_left_padded
from rlhf_lab.models.transformer_lens import HookedTransformer, HookPoint, why_not_additive
from rlhf_lab.training.capture import ROWS_AT_ONCE, SQUARE, resolve_sites

OF_HEADS = ("attn.hook_z", "attn.hook_q", "attn.hook_k", "attn.hook_v", *SQUARE)
WRITTEN = "hook_attn_out"
Hook = tuple[str, Callable[[Tensor, HookPoint], Tensor | None]]


class PatchPlace(NamedTuple):
    """An activation, or one head's or some positions' share of it.

    Args:
        site: a hook point.
        head: at `hook_attn_out`, what this head writes into the residual stream; at the sites of
            single heads, its own entries.
        positions: columns of the text, from the end where negative; all when None. Of patterns and
            scores they are the queries'.
    """

    site: str
    head: int | None = None
    positions: tuple[int, ...] | None = None


class Side(NamedTuple):
    """A model and the text that it reads, one of two whose activations are exchanged.

    Args:
        tokens: rows of one length, padded on the left or not at all.
        mask: False on padding.
    """

    model: HookedTransformer
    tokens: Int[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"] | None = None


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


def part_places(
    model: HookedTransformer, positions: tuple[int, ...] | None = None
) -> dict[str, PatchPlace]:
    """What every part writes into the residual stream: embeddings, heads and MLPs by name.

    Raises:
        ConfigError: the model normalizes what attention gives before it is added.
    """
    sites = {name: f"hook_{name}" for name in ("embed", "pos_embed")}
    there = {name: site for name, site in sites.items() if site in model.hook_dict}
    places = {name: PatchPlace(site, None, positions) for name, site in there.items()}
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            place = PatchPlace(f"blocks.{layer}.{WRITTEN}", head, positions)
            places[f"L{layer}H{head}"] = place
        places[f"L{layer} mlp"] = PatchPlace(f"blocks.{layer}.hook_mlp_out", None, positions)
    _refuse_normalized(model)
    return places


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
    places: dict[str, PatchPlace],
    pos: int,
    words: tuple[int, int],
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
        tick: called behind every patched forward.

    Raises:
        ConfigError: texts of unequal shape, a site, head or position that is not there, or models
            whose heads' shares cannot be told apart.

    (Vig et al. 2020; Meng et al. 2022; Heimersheim and Nanda 2024, arXiv 2404.15255)
    """
    refuse_no_names(places, words)
    chosen = list(places.values())
    refuse_unlike_sides(receiver, donor, chosen, pos)
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

    reads = dict.fromkeys(_z_of(place) if _writes(place) else place.site for place in places)
    _run(side, [*hooks, *((site, keep) for site in reads)])
    return [
        _written(side.model, place, kept[_z_of(place)]) if _writes(place) else kept[place.site]
        for place in places
    ]


def hooks_to(side: Side, place: PatchPlace, value: Float[Tensor, "batch ..."]) -> list[Hook]:
    """Hooks that put a value at a place, with padding on the right."""
    chosen = torch.ones_like(side.mask) if place.positions is None else ~torch.ones_like(side.mask)
    if place.positions is not None:
        chosen[:, list(place.positions)] = True
        chosen = rotate_padding(chosen, side.mask, "right")
    if not _writes(place):
        return [(place.site, patch_hook(value, place.head, chosen))]
    now: list[Tensor] = []

    def keep(z: Tensor, hook: HookPoint) -> None:
        now[:] = [_written(side.model, place, z)]

    def exchange(written: Tensor, hook: HookPoint) -> Tensor:
        changed = written + (value - now[0]).to(written)
        return torch.where(chosen[:, :, None], changed, written)

    return [(_z_of(place), keep), (place.site, exchange)]


def _writes(place: PatchPlace) -> bool:
    return place.head is not None and place.site.endswith(WRITTEN)


def _z_of(place: PatchPlace) -> str:
    return f"{place.site.removesuffix(WRITTEN)}attn.hook_z"


def _written(
    model: HookedTransformer, place: PatchPlace, z: Float[Tensor, "batch seq head d_head"]
) -> Float[Tensor, "batch seq d_model"]:
    """What one head adds to the residual stream."""
    layer = int(place.site.split(".")[1])
    return z[:, :, place.head] @ model.blocks[layer].attn.W_O[place.head]


def refuse_unlike_sides(
    receiver: Side, donor: Side, places: Sequence[PatchPlace], pos: int
) -> None:
    """Raise ConfigError for texts that do not match, or places that a model does not have."""
    masks = [
        torch.ones_like(s.tokens).bool() if s.mask is None else s.mask for s in (receiver, donor)
    ]
    seq = receiver.tokens.shape[1]
    if masks[0].shape != masks[1].shape or not torch.equal(*(mask.cpu() for mask in masks)):
        raise ConfigError(
            f"the two texts have shapes {tuple(receiver.tokens.shape)} and "
            f"{tuple(donor.tokens.shape)} or other padding; give texts that match token by token."
        )
    for position in (pos, *(p for place in places for p in place.positions or ())):
        if not -seq <= position < seq:
            raise ConfigError(f"position={position} lies outside texts of {seq} tokens.")
    if not masks[0][:, pos].all():
        raise ConfigError(f"pos={pos} is padding in some rows; choose a token of every row.")
    for side in (receiver, donor):
        if hasattr(side.model, "base_model"):
            raise ConfigError(
                "a Side has a policy with its value head, which returns two things; give its "
                "language model, policy.base_model."
            )
        for place in places:
            _refuse_place(side.model, place)


def refuse_no_names(places: dict[str, PatchPlace], words: tuple[int, int]) -> None:
    """Raise ConfigError for places without names, and for words that are no token ids."""
    if not isinstance(places, dict):
        raise ConfigError(
            f"places is a {type(places).__name__}; give a dict of names, such as "
            '{"L0H1": PatchPlace("blocks.0.attn.hook_z", head=1)}.'
        )
    if len(words) != 2 or any(isinstance(word, str) for word in words):
        raise ConfigError(
            f"words={words!r:.60} are not two token ids; the tokenizer's encode gives them."
        )


def _refuse_place(model: HookedTransformer, place: PatchPlace) -> None:
    resolve_sites(model, [place.site])
    if place.head is None:
        return
    if _writes(place):
        _refuse_normalized(model)
    elif not place.site.endswith(OF_HEADS):
        raise ConfigError(
            f"the site {place.site!r} has no heads apart; leave out head={place.head}, or choose "
            "attn.hook_z, or hook_attn_out for what a head writes."
        )
    n_heads = model.cfg.n_heads
    if place.site.endswith(("hook_k", "hook_v")):
        n_heads = model.cfg.n_key_value_heads or n_heads
    if not 0 <= place.head < n_heads:
        raise ConfigError(f"head={place.head} is not there; {place.site!r} has {n_heads} heads.")


def _refuse_normalized(model: HookedTransformer) -> None:
    why = why_not_additive(model)
    if why is not None and "logits" not in why:
        raise ConfigError(
            f"what one head writes cannot be told apart, since {why}; patch attn.hook_z instead."
        )
