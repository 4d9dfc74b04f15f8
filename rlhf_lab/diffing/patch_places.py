"""Places of activation patching, its two sides, and what is refused of both."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.residual_parts import reason_not_additive
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.training.capture import SQUARE, resolve_sites

OF_HEADS = ("attn.hook_z", "attn.hook_q", "attn.hook_k", "attn.hook_v", *SQUARE)
WRITTEN = "hook_attn_out"


class PatchPlace(NamedTuple):
    """An activation, or one head's or some positions' share of it.

    Args:
        site: a hook point.
        head: at `hook_attn_out`, what this head writes into the residual stream; at the sites of
            single heads, its own entries.
        positions: one or several columns of the text, from the end where negative; all when None.
            Of patterns and scores they are the queries'.
    """

    site: str
    head: int | None = None
    positions: int | tuple[int, ...] | None = None

    @property
    def columns(self) -> tuple[int, ...]:
        """The positions, none where all are meant."""
        given = () if self.positions is None else self.positions
        return (given,) if isinstance(given, int) else tuple(given)


class Side(NamedTuple):
    """A model and the text that it reads, one of two whose activations are exchanged.

    Args:
        model: a language model, or a policy, whose `base_model` is meant.
        tokens: rows of one length, padded on the left or not at all.
        mask: False on padding.
    """

    model: HookedModel | TransformerWithValueHead
    tokens: Int[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"] | None = None


def language_sides(*sides: Side) -> list[Side]:
    """Sides with language models: a policy's value head has no part in what is patched."""
    return [side._replace(model=getattr(side.model, "base_model", side.model)) for side in sides]


def part_places(
    model: HookedModel, positions: tuple[int, ...] | None = None
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


def writes(place: PatchPlace) -> bool:
    """Whether it is what one head adds to the residual stream."""
    return place.head is not None and place.site.endswith(WRITTEN)


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
    for position in (pos, *(p for place in places for p in place.columns)):
        if not -seq <= position < seq:
            raise ConfigError(f"position={position} lies outside texts of {seq} tokens.")
    if not masks[0][:, pos].all():
        raise ConfigError(f"pos={pos} is padding in some rows; choose a token of every row.")
    for side in (receiver, donor):
        for place in places:
            _refuse_place(side.model, place)


def places_by_name(places: dict[str, PatchPlace | str]) -> dict[str, PatchPlace]:
    """Places by name; a hook point alone stands for all of its activation.

    Raises:
        ConfigError: no dict, or something in it that is no place.
    """
    if not isinstance(places, dict):
        raise ConfigError(
            f"places is a {type(places).__name__}; give a dict of names, such as "
            '{"L0H1": PatchPlace("blocks.0.attn.hook_z", head=1)}.'
        )
    found = {n: PatchPlace(one) if isinstance(one, str) else one for n, one in places.items()}
    for name, place in found.items():
        if not isinstance(place, PatchPlace):
            raise ConfigError(
                f"places has {place!r:.60} at {name!r}; give a PatchPlace or a hook point's name."
            )
    return found


def word_ids(model: HookedModel, words: tuple[int | str, int | str]) -> tuple[int, int]:
    """The token ids of two words, which may be given as ids already.

    Raises:
        ConfigError: they are not two, or one is no single token of the model's tokenizer.
    """
    if isinstance(words, str) or len(words) != 2:
        raise ConfigError(f"words={words!r:.60} are not two; give two words, or two token ids.")
    first, other = (single_token(model.tokenizer, w) if isinstance(w, str) else w for w in words)
    return first, other


def _refuse_place(model: HookedModel, place: PatchPlace) -> None:
    resolve_sites(model, [place.site])
    if place.head is None:
        return
    if writes(place):
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


def _refuse_normalized(model: HookedModel) -> None:
    why = reason_not_additive(model)
    if why is not None and "logits" not in why:
        raise ConfigError(
            f"what one head writes cannot be told apart, since {why}; patch attn.hook_z instead."
        )
