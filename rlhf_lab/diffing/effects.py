"""Effects of parts on a logit difference, each method beside the others, and how far they agree."""

import re

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, coarse_groups
from rlhf_lab.diffing.logit_shift import ends_of, split_shift
from rlhf_lab.diffing.patching import PatchPlace, Side, patch_activations
from rlhf_lab.diffing.shift_matrix import shift_matrix
from rlhf_lab.models.residual_parts import SITES, residual_components
from rlhf_lab.models.transformer_lens import HookedTransformer, is_centered
from rlhf_lab.training.capture import capture_activations

READ_OUT_PART = "read-out"


def layer_groups(model: HookedTransformer) -> Groups:
    """`coarse_groups` with the final norm and the unembedding as one part, the read-out."""
    groups = coarse_groups(model)
    *names, _, _ = groups.names
    *parts, norm, unembed = groups.parts
    return Groups([*names, READ_OUT_PART], [*parts, [*norm, *unembed]])


def effects_of_parts(
    model0: HookedTransformer,
    model1: HookedTransformer,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    ids: tuple[int, int],
) -> dict[str, Float[Tensor, "part batch"]]:
    """Say by five methods what the change of each of `layer_groups` does to a logit difference.

    1. "own weights" and "inherited": by `split_shift`, through each part's output at `pos`.
    2. "by weights": by `shift_matrix`, through whatever reads the part, at any position.
    3. "patched in": the base with the part's output, at all positions, of the tuned model.
    4. "patched out": what the tuned model loses with the base's.

    The read-out has no output: it is what both residual streams differ in when read the other way.

    Raises:
        ConfigError: unlike models, or logits that are no sum over parts.
    """
    names = layer_groups(model0).names
    own, inherited, read_out = _by_cause(model0, model1, tokens, pos, ids, names)
    weights = shift_matrix(model0, model1, tokens, pos, ids, layer_groups(model0)).by_weights
    last = f"blocks.{model0.cfg.n_layers - 1}.hook_resid_post"
    places = {name: PatchPlace(_site(name)) for name in names[:-1]} | {"last": PatchPlace(last)}
    sides = Side(model0, tokens), Side(model1, tokens)
    into = patch_activations(sides[0], sides[1], places, pos, ids)
    out = patch_activations(sides[1], sides[0], places, pos, ids)
    rows_in, rows_out = into.patched - into.start, out.start - out.patched
    rows_in[-1] = out.patched[-1] - out.end
    rows_out[-1] = into.end - into.patched[-1]
    return {
        "own weights": torch.cat([own, read_out[None]]).cpu(),
        "inherited": torch.cat([inherited, torch.zeros_like(read_out)[None]]).cpu(),
        "by weights": weights.cpu(),
        "patched in": rows_in.cpu(),
        "patched out": rows_out.cpu(),
    }


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
    model0: HookedTransformer,
    model1: HookedTransformer,
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
