"""Activation patching: activations of one forward pass put into another, by hook and position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.contrast import Contrast, Words, make_contrast
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, recovered_fraction
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.models.padding import rotate_padding, run_left_padded
from rlhf_lab.models.residual_parts import reason_not_additive
from rlhf_lab.training.capture import ROWS_AT_ONCE, SQUARE, resolve_sites

Hook = tuple[str, Callable[[Tensor, HookPoint], Tensor | None]]
HEAD_SITES = ("attn.hook_z", "attn.hook_q", "attn.hook_k", "attn.hook_v", *SQUARE)
ATTN_OUT = "hook_attn_out"


class PatchPlace(NamedTuple):
    """An activation, or the entries of one head or some positions.

    Args:
        site: a hook point.
        head: at `hook_attn_out`, the output of this head; at the sites of heads, its entries.
        positions: one or several columns of the text, from the end if negative; all if None. For
            patterns and scores these are positions of the query.
    """

    site: str
    head: int | None = None
    positions: int | tuple[int, ...] | None = None

    @property
    def is_head_output(self) -> bool:
        """True for the output of one head to the residual stream."""
        return self.head is not None and self.site.endswith(ATTN_OUT)


class Side(NamedTuple):
    """A model and its text, one of two whose activations are exchanged.

    Args:
        model: a language model, or a policy, for its `base_model`.
        tokens: rows of one length, padded on the left or not at all.
        mask: False on padding.
    """

    model: HookedModel | TransformerWithValueHead
    tokens: Int[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"] | None = None


@dataclass(frozen=True)
class Patched:
    """Logit differences of the receiver, with an activation of the donor at one place at a time.

    Args:
        names: of the places.
        start: of the receiver without a patch.
        end: of the donor.
        patched: with each place patched.
    """

    names: list[str]
    start: Float[Tensor, " batch"]
    end: Float[Tensor, " batch"]
    patched: Float[Tensor, "place batch"]

    def fractions(self) -> dict[str, Interval]:
        """Return the fraction of the way from start to end that each place brings."""
        rows = zip(self.names, self.patched, strict=True)
        return {name: recovered_fraction(self.end, self.start, row) for name, row in rows}


def part_places(
    model: HookedModel, positions: tuple[int, ...] | None = None
) -> dict[str, PatchPlace]:
    """Return the outputs of all embeddings, heads and MLPs to the residual stream, by name.

    Raises:
        ConfigError: If the model normalizes the output of attention.
    """
    _validate_heads_additive(model)
    embeddings = [name for name in ("embed", "pos_embed") if f"hook_{name}" in model.hook_dict]
    places = {name: PatchPlace(f"hook_{name}", None, positions) for name in embeddings}
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            places[f"L{layer}H{head}"] = PatchPlace(f"blocks.{layer}.{ATTN_OUT}", head, positions)
        places[f"L{layer} mlp"] = PatchPlace(f"blocks.{layer}.hook_mlp_out", None, positions)
    return places


def patch_activations(
    receiver: Side,
    donor: Side,
    places: dict[str, PatchPlace | str],
    pos: int,
    words: Words,
) -> Patched:
    """Put the donor's activation at each place in turn into the receiver, and read its logits.

    1. Run both, and keep the donor's activations at the places.
    2. Run the receiver once for each place, with the donor's activation there.
    3. Read logit(words[0]) - logit(words[1]), or the weighted sum, at `pos`.

    Sides with two models and one text measure a change by training; sides with one model and two
    texts measure which components carry the difference of the texts. A patch from the base into the
    tuned model shows what is necessary; the other way round, what is sufficient.

    Args:
        places: by name; the name of a hook point stands for its whole activation.
        words: two single tokens, or weights by token; see `make_contrast`.

    Raises:
        ConfigError: If the texts differ in shape or padding, a site or head does not exist, or the
            outputs of heads cannot be separated.

    (Vig et al. 2020; Meng et al. 2022; Heimersheim and Nanda 2024, arXiv 2404.15255)
    """
    chosen = [PatchPlace(place) if isinstance(place, str) else place for place in places.values()]
    receiver, donor = validate_sides(receiver, donor, chosen, pos)
    contrast = make_contrast(receiver.model, words)
    found = []
    for rows in torch.arange(len(receiver.tokens)).split(ROWS_AT_ONCE):
        to, source = take_rows(receiver, rows), take_rows(donor, rows)
        values = captured_at(source, chosen)
        each = [logit_difference(side, pos, contrast) for side in (to, source)]
        for place, value in zip(chosen, values, strict=True):
            each.append(logit_difference(to, pos, contrast, hooks_to(to, place, value)))
        found.append(torch.stack(each))
    values = torch.cat(found, dim=1)
    return Patched(list(places), values[0], values[1], values[2:])


def patch_hook(
    source: Float[Tensor, "batch ..."],
    head: int | None = None,
    positions: Bool[Tensor, "batch seq"] | None = None,
) -> Callable[[Tensor, HookPoint], Tensor]:
    """Return a hook that replaces an activation with that of another forward pass.

    Args:
        source: of one site; `[batch head query key]` for patterns and scores.
        head: the only head whose entries are replaced; all if None.
        positions: True where the activation is replaced; everywhere if None.
    """

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        patched = activation.clone()
        to, of = patched, source.to(activation)
        if hook.name.endswith(SQUARE):  # [batch head query key]
            to, of = to.transpose(1, 2), of.transpose(1, 2)
        if head is not None:
            to, of = to[:, :, head], of[:, :, head]
        where = slice(None) if positions is None else positions.to(activation.device)
        to[where] = of[where]
        return patched

    return put


def validate_sides(
    receiver: Side, donor: Side, places: Sequence[PatchPlace], pos: int
) -> tuple[Side, Side]:
    """Return both sides with language models and masks; raise ConfigError unless they match."""
    receiver, donor = (
        side._replace(
            model=getattr(side.model, "base_model", side.model),
            mask=torch.ones_like(side.tokens).bool() if side.mask is None else side.mask,
        )
        for side in (receiver, donor)
    )
    if not torch.equal(receiver.mask.cpu(), donor.mask.cpu()):
        raise ConfigError(
            f"the two texts have shapes {tuple(receiver.tokens.shape)} and "
            f"{tuple(donor.tokens.shape)} or other padding. Pass texts that match token by token."
        )
    if not receiver.mask[:, pos].all():
        raise ConfigError(f"pos={pos} is padding in some rows. Choose a token of every row.")
    for place in places:
        for model in (receiver.model, donor.model):
            _validate_place(model, place)
    return receiver, donor


def take_rows(side: Side, rows: Int[Tensor, " rows"]) -> Side:
    """Return some rows of a side, on its model's device."""
    device = next(side.model.parameters()).device
    return Side(side.model, side.tokens[rows].to(device), side.mask[rows].to(device))


def logit_difference(
    side: Side, pos: int, contrast: Contrast, hooks: Sequence[Hook] = ()
) -> Float[Tensor, " batch"]:
    """Return the contrast of the logits at one position of a forward pass with hooks."""
    return contrast.of(_run(side, hooks)[:, pos])


def captured_at(
    side: Side, places: Sequence[PatchPlace], hooks: Sequence[Hook] = ()
) -> list[Float[Tensor, "batch ..."]]:
    """Return the activation at each place (the output of a head), with padding on the right."""
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint) -> None:
        kept[hook.name] = activation.detach()

    sites = [_z_site(place) if place.is_head_output else place.site for place in places]
    _run(side, [*hooks, *((site, keep) for site in dict.fromkeys(sites))])
    return [
        _head_output(side.model, place, kept[site]) if place.is_head_output else kept[site]
        for place, site in zip(places, sites, strict=True)
    ]


def hooks_to(side: Side, place: PatchPlace, value: Float[Tensor, "batch ..."]) -> list[Hook]:
    """Return hooks that put a value at a place, with padding on the right."""
    chosen = torch.ones_like(side.mask) if place.positions is None else ~torch.ones_like(side.mask)
    if place.positions is not None:
        chosen[:, place.positions] = True
        chosen = rotate_padding(chosen, side.mask, "right")
    if not place.is_head_output:
        return [(place.site, patch_hook(value, place.head, chosen))]
    now: list[Tensor] = []

    def keep(z: Tensor, hook: HookPoint) -> None:
        now[:] = [_head_output(side.model, place, z)]

    def exchange(output: Tensor, hook: HookPoint) -> Tensor:
        changed = output + (value - now[0]).to(output)
        return torch.where(chosen[:, :, None], changed, output)

    return [(_z_site(place), keep), (place.site, exchange)]


@torch.no_grad()
def _run(side: Side, hooks: Sequence[Hook]) -> Float[Tensor, "batch seq d_vocab"]:
    run = lambda tokens: (side.model(tokens, attention_mask=torch.ones_like(tokens)),)
    with side.model.hooks(fwd_hooks=list(hooks)):
        return run_left_padded(run, side.tokens, side.mask)[0]


def _z_site(place: PatchPlace) -> str:
    return f"{place.site.removesuffix(ATTN_OUT)}attn.hook_z"


def _head_output(
    model: HookedModel, place: PatchPlace, z: Float[Tensor, "batch seq head d_head"]
) -> Float[Tensor, "batch seq d_model"]:
    layer = int(place.site.split(".")[1])
    return z[:, :, place.head] @ model.blocks[layer].attn.W_O[place.head]


def _validate_place(model: HookedModel, place: PatchPlace) -> None:
    resolve_sites(model, [place.site])
    if place.head is None:
        return
    if place.is_head_output:
        _validate_heads_additive(model)
    elif not place.site.endswith(HEAD_SITES):
        raise ConfigError(
            f"the site {place.site!r} has no heads. Remove head={place.head}, or choose "
            "attn.hook_z, or hook_attn_out for the output of a head."
        )
    if not 0 <= place.head < model.cfg.n_heads:
        raise ConfigError(f"head={place.head} must be from 0 to {model.cfg.n_heads - 1}.")


def _validate_heads_additive(model: HookedModel) -> None:
    why = reason_not_additive(model)
    if why is not None and "logits" not in why:
        raise ConfigError(f"The outputs of heads do not add up: {why}. Patch attn.hook_z instead.")
