"""Activations of the policy: reading them, and changing them for a whole run."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import filter as match_names
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel, has_custom_forward
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.models.padding import rotate_padding, run_left_padded
from rlhf_lab.training.callbacks import Context, Event, function_name, no_side_effects

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

OUTPUTS = ("logits", "values")
WITHOUT_TEXT = ("run_start", "checkpoint", "run_end")
SQUARE = ("hook_pattern", "hook_attn_scores")  # a position of the query and one of the key
ROWS_AT_ONCE = 64
Stage = Literal["rollout", "learning"]
STAGES = get_args(Stage)
Position = int | Literal["last"] | Int[Tensor, " batch"] | None


def resolve_sites(
    model: TransformerWithValueHead | HookedModel, hook_names: str | Sequence[str]
) -> list[str]:
    """Expand hook names with wildcards, and "logits" and "values", in the order of the model."""
    known, sites = [*model.hook_dict, *OUTPUTS], set()
    for name in [hook_names] if isinstance(hook_names, str) else hook_names:
        sites.update(found := match_names(known, name))
        if not found:
            raise ConfigError(
                f"hook_names has {name!r}, which the model does not have. Choose from "
                "policy.hook_dict, such as 'blocks.0.hook_resid_post', or 'logits' or 'values'."
            )
    return [site for site in known if site in sites]


@torch.no_grad()
def capture_activations(
    policy: TransformerWithValueHead | HookedModel,
    tokens: Int[Tensor, "batch seq"],
    hook_names: str | Sequence[str],
    pos: int | Int[Tensor, " batch"] | None = None,
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> dict[str, Tensor]:
    """Run a model on finished sequences and return activations by name.

    They have all positions `[batch seq ...]`, or those at `pos` `[batch ...]`; attention patterns
    and scores are `[batch head query key]`, and 0 where the query is padding.

    Args:
        policy: the policy, or a bare HookedModel (which has no "values").
        pos: a position, or one for each sequence, counted from the end if negative.
        attention_mask: False on left padding.

    Raises:
        ConfigError: If a name is unknown, or a site does not fire.
    """
    sites = resolve_sites(policy, hook_names)
    mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
    square = _square_sites(sites, pos)
    device, run = next(policy.parameters()).device, partial(_activations, policy, sites)
    chunks = []
    for start in range(0, max(len(tokens), 1), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        row_mask = mask[rows].to(device)
        chunk = run_left_padded(run, tokens[rows].to(device), row_mask)
        if square:
            chunk = _rotate_keys(chunk, sites, row_mask)
        if pos is not None:  # at once: all positions of all rows may be too many to keep
            is_each = isinstance(pos, Tensor)
            first = torch.arange(len(row_mask), device=device) if is_each else slice(None)
            at = pos[rows].to(device) if is_each else pos
            chunk = tuple(x[first, at].clone() for x in chunk)
        chunks.append(chunk)
    return dict(zip(sites, map(torch.cat, zip(*chunks, strict=True)), strict=True))


def _square_sites(sites: Sequence[str], pos: object) -> list[str]:
    square = [site for site in sites if site.endswith(SQUARE)]
    if square and pos is not None:
        raise ConfigError(
            f"the site {square[0]!r} has no single position axis. Capture it with pos=None, and "
            "index the query, as in acts[site][:, :, -1]."
        )
    return square


def _activations(
    policy: TransformerWithValueHead | HookedModel,
    sites: list[str],
    tokens: Int[Tensor, "batch seq"],
) -> tuple[Tensor, ...]:
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint) -> None:
        kept[hook.name] = activation.detach()

    with policy.hooks(fwd_hooks=[(site, keep) for site in sites if site not in OUTPUTS]):
        if isinstance(policy, HookedModel):
            needs_logits = "logits" in sites or has_custom_forward(policy)
            options = {} if needs_logits else {"return_type": None}
            kept["logits"] = policy(tokens, attention_mask=torch.ones_like(tokens), **options)
        else:
            kept |= zip(OUTPUTS, policy(tokens), strict=True)
    for site in sites:
        if site not in kept:
            raise ConfigError(
                f"the site {site!r} did not fire; this model's cfg turns it off. Choose another."
            )
    # queries first, so they are rotated with the positions of all other activations
    return tuple(kept[s].transpose(1, 2) if s.endswith(SQUARE) else kept[s] for s in sites)


def _rotate_keys(
    activations: Sequence[Tensor], sites: Sequence[str], mask: Bool[Tensor, "batch seq"]
) -> tuple[Tensor, ...]:
    rotated = []
    for site, x in zip(sites, activations, strict=True):
        if site.endswith(SQUARE):
            x = rotate_padding(x.transpose(1, 3), mask, "left").transpose(1, 3)
            x = x.masked_fill(~mask[:, :, None, None], 0.0).transpose(1, 2)
        rotated.append(x)
    return tuple(rotated)


def text_at(ctx: Context) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Return the sequences of the phase and their attention mask, at any event that has them."""
    samples = ctx.samples if ctx.event == "after_rollout" else ctx.rollout.samples
    return samples.tokens, samples.attention_mask


def capture_at_event(
    trainer: "RLHFTrainer",
    hook_names: str | Sequence[str],
    pos: Position = None,
    at: Event = "after_phase",
    every: int = 1,
    tokens: Int[Tensor, "batch seq"] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated `function(ctx, acts)` as a callback that reads activations.

    The activations come from a separate forward pass, never from sampling: over the phase's
    sequences, or over `tokens`. One site gives a tensor `[batch seq d_model]`, or `[batch d_model]`
    at a `pos`; several, or a name with wildcards, a dict of these by name.

    Args:
        hook_names: such as "blocks.1.hook_resid_post" or "blocks.*.hook_mlp_out", "logits" or
            "values".
        pos: a position; one for each sequence; or "last", the last token of each sequence,
            which is before the end if a response ended early.

    Raises:
        ConfigError: If a site or position is invalid, or the event has no sequences.
    """
    names = [hook_names] if isinstance(hook_names, str) else list(hook_names)
    only_one = isinstance(hook_names, str) and "*" not in hook_names
    _square_sites(resolve_sites(trainer.policy, names), pos)
    if isinstance(pos, str) and pos != "last":
        raise ConfigError(f"pos={pos!r} is not a position. Pass an integer, or 'last'.")
    if tokens is None and at in WITHOUT_TEXT:
        raise ConfigError(f"at={at!r} has no sequences. Pass tokens=.")
    if not isinstance(tokens, Tensor | None):
        raise ConfigError("tokens is not a tensor. Pass token ids [batch, seq], as of to_tokens.")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def callback(ctx: Context) -> Any:
            with no_side_effects(ctx.policy, ctx.reference):
                text, mask = text_at(ctx) if tokens is None else (tokens, None)
                position = -1 if isinstance(pos, str) else pos
                if isinstance(pos, str) and tokens is None:  # the last token before the padding
                    samples = ctx.samples if ctx.event == "after_rollout" else ctx.rollout.samples
                    written = samples.written_mask
                    index = torch.arange(written.shape[1], device=written.device)
                    position = (index * written).amax(dim=1)
                acts = capture_activations(ctx.policy, text, names, position, mask)
                return function(ctx, acts[names[0]] if only_one else acts)

        callback.__name__ = getattr(function, "__name__", "capture")
        trainer.on(at, every)(callback)
        return function

    return register


class Where(NamedTuple):
    """Second argument of an intervention."""

    phase: int  # number of learning phases that are done
    event: Stage  # "learning" in a learning phase, otherwise "rollout" (also in an evaluation)
    site: str  # name of the hook point


InterventionFn = Callable[[Tensor, Where], Tensor | None]


class Interventions:
    """Interventions of one policy, registered as permanent hooks; the reference has none."""

    def __init__(self, policy: TransformerWithValueHead, count_phases: Callable[[], int]) -> None:
        for other in getattr(policy, "interventions", ()):
            raise ConfigError(
                f"policy has the intervention {other['name']!r} of another trainer. Load another."
            )
        self.policy, self.count_phases = policy, count_phases
        self.stage: Stage = "rollout"
        self.records: list[dict[str, Any]] = []  # name, site and stages of each, as in run.json
        policy.interventions = self.records  # of the trainer that was made last
        policy.last_start = getattr(policy, "last_start", [None])  # of any trainer, in a list
        self.last_start = policy.last_start[0]  # since a graph depends on the policy's attributes

    def add(
        self,
        site: str,
        fn: InterventionFn,
        during: Stage | tuple[Stage, ...] = STAGES,
        name: str | None = None,
    ) -> None:
        """Change an activation with `fn(activation, where)` from now on.

        Args:
            fn: returns the new activation, or changes it in place.
            name: by which a resumed run requires the function; the function's name if None.

        Raises:
            ConfigError: If site or stage is unknown, the site is an output, or the name is taken.
        """
        name = function_name(fn) if name is None else name
        during = (during,) if isinstance(during, str) else during
        if not during or not set(during) <= set(STAGES):
            raise ConfigError(f"during={during!r} must name {' or '.join(STAGES)}, or both.")
        if any(name == other["name"] for other in self.records):
            raise ConfigError(f"name={name!r} is taken by another intervention. Choose another.")
        points = self.policy.hook_dict
        sites = resolve_sites(self.policy, [site])
        if not set(sites) <= points.keys():
            raise ConfigError(f"site={site!r} is an output. Choose a hook point of the model.")

        is_first = True

        def intervene(activation: Tensor, hook: HookPoint) -> Tensor | None:
            nonlocal is_first
            if self.stage not in during:
                return None
            shape, dtype = activation.shape, activation.dtype
            version = -1 if activation.is_inference() else activation._version
            result = fn(activation, Where(self.count_phases(), self.stage, hook.name))
            new = activation if result is None else result
            fits = isinstance(new, Tensor) and (new.shape, new.dtype) == (shape, dtype)
            if not fits or new.isnan().any():  # infinity is allowed: attention scores contain it
                raise ConfigError(
                    f"The intervention {name!r} must return an activation of shape "
                    f"{tuple(shape)} and {dtype} without nan."
                )
            if is_first and result is None and 0 <= version == activation._version:
                problem = f"The intervention {name!r} returned None and changed nothing at first"
                remedy = "Return the new activation, or change it in place"
                warnings.warn(f"{problem}. {remedy}.", stacklevel=2)
            is_first = False
            return result

        for each in sites:
            # permanent: reset_hooks() in a callback does not remove it
            points[each].add_hook(intervene, is_permanent=True)
        self.records.append({"name": name, "site": site, "during": list(during)})


def restore_interventions(
    add: Callable[..., None],
    info: Mapping[str, Any],
    given: Mapping[str, InterventionFn] | None,
    run: Any,
) -> None:
    """Call `add` for each intervention of a recorded run, with the function of its name."""
    given, records = dict(given or {}), info.get("interventions", [])
    names = [record["name"] for record in records]
    for name in set(given) - set(names):
        raise ConfigError(f"{run} has no intervention {name!r}. Choose from {names}.")
    for record in records:
        name = record["name"]
        if name not in given:
            raise ConfigError(
                f"{run} was trained with the intervention {name!r}, whose function is not "
                f"stored. Pass interventions={{{name!r}: fn}}."
            )
        add(record["site"], given[name], tuple(record["during"]), name)
