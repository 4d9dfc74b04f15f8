"""Reading activations of the policy on finished sequences, without disturbing the run."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel, has_custom_forward
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.models.padding import rotate_padding, run_left_padded
from rlhf_lab.samples import Samples
from rlhf_lab.training.callbacks import Callback, Context, Event, validate_callable
from rlhf_lab.training.isolation import no_side_effects

OUTPUTS = ("logits", "values")
WITHOUT_TEXT = ("run_start", "checkpoint", "run_end")
SQUARE = ("hook_pattern", "hook_attn_scores")  # a position of the query and one of the key
ROWS_AT_ONCE = 64
Position = int | Literal["last"] | Int[Tensor, " batch"] | None


def resolve_sites(
    model: TransformerWithValueHead | HookedModel, hook_names: str | Sequence[str]
) -> list[str]:
    """Spell out a hook name, or several, with wildcards, in the order in which the model runs.

    `blocks.*.hook_resid_post` stands for that hook of every block. "logits" and "values", the
    policy's two outputs, count as names too.

    Raises:
        ConfigError: a name that the model does not have.
    """
    known = [*model.hook_dict, *OUTPUTS]
    hook_names = [hook_names] if isinstance(hook_names, str) else hook_names
    for name in hook_names:
        if not any(fnmatchcase(site, name) for site in known):
            raise ConfigError(
                f"hook_names has {name!r}, which the model does not have; choose from "
                "policy.hook_dict, such as 'blocks.0.hook_resid_post', or 'logits' "
                "or 'values'."
            )
    return [site for site in known if any(fnmatchcase(site, name) for name in hook_names)]


@torch.no_grad()
def capture_activations(
    policy: TransformerWithValueHead | HookedModel,
    tokens: Int[Tensor, "batch seq"],
    hook_names: str | Sequence[str],
    pos: int | Int[Tensor, " batch"] | None = None,
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> dict[str, Tensor]:
    """Activations of a model on finished sequences, from forwards made for nothing else.

    1. Spell out the names.
    2. Run the model on some rows at a time, with a hook on every site that keeps its activation.
    3. Keep all positions `[batch seq ...]`, or those at `pos` `[batch ...]`; attention patterns and
       scores are `[batch head query key]`, and 0 where the query is padding.

    Args:
        policy: the policy, or a bare HookedModel (which has no "values").
        pos: a position, or one for each sequence, counted from the end when negative.
        attention_mask: False on left padding.

    Raises:
        ConfigError: an unknown name, a position outside the sequences, or a site that did not fire.
    """
    sites = resolve_sites(policy, hook_names)
    places = None if pos is None else _places(tokens, pos)
    mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
    square = _square_sites(sites, pos)
    device, run = next(policy.parameters()).device, partial(_activations, policy, sites)
    parts = []
    for start in range(0, max(len(tokens), 1), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        rows, row_mask = tokens[some], mask[some]
        found = run_left_padded(run, rows.to(device), row_mask.to(device))
        if square:
            found = _with_keys_turned(found, sites, row_mask.to(device))
        if places is not None:  # at once: all positions of all rows may be too many to keep
            at = places[some].to(device)
            each = torch.arange(len(at), device=device)
            found = tuple(x[each, at] for x in found)
        parts.append(found)
    return dict(zip(sites, map(torch.cat, zip(*parts, strict=True)), strict=True))


def _places(
    tokens: Int[Tensor, "batch seq"], pos: int | Int[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """The position of each sequence that is asked for.

    Raises:
        ConfigError: one lies outside the sequences, or there is not one for each.
    """
    places = torch.full((len(tokens),), pos) if isinstance(pos, int) else pos
    if places.shape != (len(tokens),):
        raise ConfigError(
            f"pos has shape {tuple(places.shape)}; give one position, or one for each of the "
            f"{len(tokens)} sequences."
        )
    length = tokens.shape[1]
    outside = places[(places < -length) | (places >= length)].tolist()
    if outside:
        raise ConfigError(
            f"pos={outside[0]} lies outside sequences of {length} tokens; "
            f"choose from {-length} to {length - 1}."
        )
    return places


def _square_sites(sites: Sequence[str], pos: object) -> list[str]:
    """The sites with a position of the query and one of the key, of which `pos` would be neither.

    Raises:
        ConfigError: there is one, and `pos` is given.
    """
    square = [site for site in sites if site.endswith(SQUARE)]
    if square and pos is not None:
        raise ConfigError(
            f"the site {square[0]!r} has no single position axis; capture it with pos=None, and "
            "index the query, as in acts[site][:, :, -1]."
        )
    return square


def _activations(
    policy: TransformerWithValueHead | HookedModel,
    sites: list[str],
    tokens: Int[Tensor, "batch seq"],
) -> tuple[Tensor, ...]:
    """What each site has in one forward."""
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint) -> None:
        kept[hook.name] = activation.detach()

    with policy.hooks(fwd_hooks=[(site, keep) for site in sites if site not in OUTPUTS]):
        if isinstance(policy, HookedModel):
            asked = {} if "logits" in sites or has_custom_forward(policy) else {"return_type": None}
            kept["logits"] = policy(tokens, attention_mask=torch.ones_like(tokens), **asked)
        else:
            kept |= zip(OUTPUTS, policy(tokens), strict=True)
    for site in sites:
        if site not in kept:
            raise ConfigError(
                f"the site {site!r} did not fire; it is switched off in this model's cfg, so "
                "choose another site."
            )
    # queries come first, so that they are turned with the positions of all other activations
    return tuple(
        kept[site].transpose(1, 2) if site.endswith(SQUARE) else kept[site] for site in sites
    )


def _with_keys_turned(
    found: Sequence[Tensor], sites: Sequence[str], mask: Bool[Tensor, "batch seq"]
) -> tuple[Tensor, ...]:
    """Attention patterns and scores `[batch head query key]` of rows that are padded on the left.

    Keys are turned as queries have been: to where each row's tokens stand. What a query on padding
    would see is put to 0; no other sees padding, whose keys stand behind it.
    """
    turned = []
    for site, x in zip(sites, found, strict=True):
        if site.endswith(SQUARE):
            x = rotate_padding(x.transpose(1, 3), mask, "left").transpose(1, 3)
            x = x.masked_fill(~mask[:, :, None, None], 0.0).transpose(1, 2)
        turned.append(x)
    return tuple(turned)


def samples_at(ctx: Context) -> Samples:
    """What the policy wrote in the phase, at any event that has it."""
    return ctx.samples if ctx.event == "after_rollout" else ctx.rollout.samples


def text_at(ctx: Context) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """The sequences of the phase and their attention mask, at any event that has them."""
    samples = samples_at(ctx)
    return samples.tokens, samples.attention_mask


def last_token(written: Bool[Tensor, "batch seq"]) -> Int[Tensor, " batch"]:
    """The position of the last real token of each sequence."""
    return (torch.arange(written.shape[1], device=written.device) * written).amax(dim=1)


def _refuse_no_position(pos: object, tokens: object) -> None:
    """Refuse what says nowhere to look, or says it for sequences that are yet to be written."""
    is_number = isinstance(pos, int) and not isinstance(pos, bool)
    if isinstance(pos, Tensor) and tokens is None:
        raise ConfigError(
            "pos has a position for each sequence, and these are not written yet; give tokens=, or "
            "pos='last' for the last token of each."
        )
    if not (pos is None or is_number or isinstance(pos, Tensor) or pos == "last"):
        raise ConfigError(
            f"pos={pos!r} is no position; give a whole number, or 'last' for the last token that "
            "each sequence has."
        )


def capturing(
    policy: TransformerWithValueHead,
    hook_names: str | Sequence[str],
    pos: Position,
    at: Event,
    tokens: Int[Tensor, "batch seq"] | None,
) -> Callable[[Callable[[Context, Any], Any]], Callback]:
    """Turn `function(ctx, acts)` into a callback that captures its activations first.

    The activations come from a forward made for nothing else, never from sampling: over the
    phase's own sequences, or over `tokens`. One site gives a tensor `[batch seq d_model]`, or
    `[batch d_model]` at a `pos`; several, or a name with wildcards, a dict of these by name.

    Args:
        hook_names: such as "blocks.1.hook_resid_post" or "blocks.*.hook_mlp_out", "logits" or
            "values".
        pos: a position; one for each of `tokens`; or "last", the last token that each sequence has,
            which stands before the end where a response ended early.

    Raises:
        ConfigError: an unknown site, a position that is no number or given for attention patterns,
            or an event that has no text of its own.
    """
    names = [hook_names] if isinstance(hook_names, str) else list(hook_names)
    only_one = isinstance(hook_names, str) and "*" not in hook_names
    if not names:
        raise ConfigError(
            "hook_names is empty; name at least one site, such as blocks.0.hook_resid_post."
        )
    _square_sites(resolve_sites(policy, names), pos)
    _refuse_no_position(pos, tokens)
    if tokens is not None and not isinstance(tokens, Tensor):
        raise ConfigError(
            f"tokens={tokens!r:.60} is a {type(tokens).__name__}; give a tensor of token ids "
            "[batch seq], such as policy.base_model.to_tokens(texts)."
        )
    if tokens is None and at in WITHOUT_TEXT:
        raise ConfigError(f"at={at!r} has no sequences of its own; give tokens=.")

    def callback(function: Callable[[Context, Any], Any]) -> Callback:
        validate_callable(function, "capture", ("ctx", "acts"))

        def listen(ctx: Context) -> Any:
            with no_side_effects(ctx.policy, ctx.reference):
                text, mask = text_at(ctx) if tokens is None else (tokens, None)
                there = pos
                if pos == "last":
                    there = -1 if tokens is not None else last_token(samples_at(ctx).written_mask)
                acts = capture_activations(ctx.policy, text, names, there, mask)
                try:
                    return function(ctx, acts[names[0]] if only_one else acts)
                except (IndexError, TypeError) as error:
                    if not only_one:
                        raise
                    said = f"{error}; acts is the tensor of {names[0]}, as one site is named."
                    raise type(error)(said) from error

        listen.__name__ = getattr(function, "__name__", "capture")
        return listen

    return callback
