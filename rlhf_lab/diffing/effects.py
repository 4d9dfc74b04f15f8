"""Effects of parts on a logit difference, each method beside the others, and how far they agree."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, coarse_groups
from rlhf_lab.diffing.logit_shift import ends_of, split_shift
from rlhf_lab.diffing.patch_places import PatchPlace, Side
from rlhf_lab.diffing.patching import patch_activations
from rlhf_lab.diffing.quadrature import NODES
from rlhf_lab.diffing.shift_matrix import shift_matrix
from rlhf_lab.diffing.stages import OpenStage, unseen
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.residual_parts import SITES, residual_components
from rlhf_lab.training.capture import ROWS_AT_ONCE, capture_activations

READ_OUT_PART = "read-out"
PartMethod = Literal["split", "weights", "patching"]
PART_METHODS: tuple[PartMethod, ...] = get_args(PartMethod)
"""Ways to charge parts with a shift, by what they cost: the second takes most of the time."""


def layer_groups(model: HookedModel) -> Groups:
    """`coarse_groups` with the final norm and the unembedding as one part, the read-out."""
    groups = coarse_groups(model)
    *names, _, _ = groups.names
    *parts, norm, unembed = groups.parts
    return Groups([*names, READ_OUT_PART], [*parts, [*norm, *unembed]])


def effects_of_parts(
    model0: HookedModel,
    model1: HookedModel,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    ids: tuple[int, int],
    methods: Sequence[PartMethod] = PART_METHODS,
    stage: OpenStage = unseen,
) -> dict[str, Float[Tensor, "part batch"]]:
    """Say by five methods what the change of each of `layer_groups` does to a logit difference.

    1. "split": "own weights" and "inherited", by `split_shift`, through parts' outputs at `pos`.
       What the norm's scale does is in neither, so that they do not sum to the shift.
    2. "weights": "by weights", by `shift_matrix`, through whatever reads the part, at any position.
    3. "patching": "patched in", the base with the part's output, at all positions, of the tuned
       model; and "patched out", what the tuned model loses with the base's.

    The read-out has no output: it is what both residual streams differ in when read the other way.

    Args:
        methods: which of the three are used, in this order.
        stage: is told of the forwards of the second and third.

    Raises:
        ConfigError: unlike models, logits that are no sum over parts, or an unknown method.
    """
    refuse_unknown_methods(methods)
    groups, found = layer_groups(model0), {}
    if "split" in methods:
        own, inherited, read_out = _by_cause(model0, model1, tokens, pos, ids, groups.names)
        found["own weights"] = torch.cat([own, read_out[None]]).cpu()
        found["inherited"] = torch.cat([inherited, torch.zeros_like(read_out)[None]]).cpu()
    if "weights" in methods:
        with stage("moving the weights", NODES) as tick:
            matrix = shift_matrix(model0, model1, tokens, pos, ids, groups, tick=tick)
        found["by weights"] = matrix.by_weights.cpu()
    if "patching" in methods:
        sides = Side(model0, tokens), Side(model1, tokens)
        into, out = _by_patching(*sides, groups.names, pos, ids, stage)
        found |= {"patched in": into.cpu(), "patched out": out.cpu()}
    return found


def refuse_unknown_methods(methods: Sequence[str]) -> None:
    """Raise ConfigError for no method, one twice, or one that is not of `PART_METHODS`."""
    if not methods or not set(methods) <= set(PART_METHODS) or len(set(methods)) < len(methods):
        raise ConfigError(
            f"methods={list(methods)} must be one or more of {', '.join(PART_METHODS)}, each once."
        )


def _by_patching(
    base: Side, tuned: Side, names: list[str], pos: int, ids: tuple[int, int], stage: OpenStage
) -> tuple[Float[Tensor, "part batch"], Float[Tensor, "part batch"]]:
    """What each part brings to the base, and what the tuned model loses without it."""
    last = f"blocks.{base.model.cfg.n_layers - 1}.hook_resid_post"
    places = {name: PatchPlace(_site(name)) for name in names[:-1]} | {"last": PatchPlace(last)}
    chunks = -(-len(base.tokens) // ROWS_AT_ONCE)
    with stage("patching", 2 * len(places) * chunks) as tick:
        into = patch_activations(base, tuned, places, pos, ids, tick)
        out = patch_activations(tuned, base, places, pos, ids, tick)
    rows_in, rows_out = into.patched - into.start, out.start - out.patched
    rows_in[-1] = out.patched[-1] - out.end
    rows_out[-1] = into.end - into.patched[-1]
    return rows_in, rows_out


def kendall_tau(
    first: Float[Tensor, "*batch part"], second: Float[Tensor, "*batch part"]
) -> Float[Tensor, "*batch"]:
    """How far two orders of the same parts agree: 1 the same, -1 reversed, 0 unrelated.

    Pairs that are tied in one of them count as neither. Nan for a single part.

    tau = (concordant - discordant) / pairs   (Kendall 1938)
    """
    ahead = [(x[..., :, None] - x[..., None, :]).sign() for x in (first, second)]
    n = first.shape[-1]
    pairs = n * (n - 1)
    return (ahead[0] * ahead[1]).sum((-1, -2)) / (pairs if pairs else torch.nan)


def _site(name: str) -> str:
    """Where a layer's part writes into the residual stream."""
    if name == "embed":
        return "blocks.0.hook_resid_pre"  # positions too
    layer, kind = name[1:].split()
    return f"blocks.{layer}.hook_{kind}_out"


def _by_cause(
    model0: HookedModel,
    model1: HookedModel,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    ids: tuple[int, int],
    names: list[str],
) -> tuple[Tensor, Tensor, Tensor]:
    """Own weights and inherited of every layer's part, and the read-out, by `split_shift`."""
    acts = tuple(capture_activations(model, tokens, SITES, pos) for model in (model0, model1))
    ends = ends_of((model0, model1), acts, tokens, pos, ids)
    causes = split_shift(*ends, is_centered(model0.ln_final))
    components = residual_components(model0, acts[0])[0]
    owner = [_owner(component) for component in components]
    rows = [[i for i, who in enumerate(owner) if who == name] for name in names[:-1]]
    own, inherited = (
        torch.stack([cause[some].sum(0) for some in rows])
        for cause in (causes.own_weights, causes.inherited)
    )
    return own, inherited, causes.read_out.sum(0)


def _owner(component: str) -> str:
    """The layer's part that a component belongs to."""
    if component in ("embed", "pos_embed"):
        return "embed"
    if component.endswith("mlp"):
        return component
    return re.sub(r"^(L\d+).*", r"\1 attn", component)
