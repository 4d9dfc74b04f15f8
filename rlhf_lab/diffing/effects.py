"""Effects of whole layers on the shift of a logit difference, by three families of methods."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.contrast import Words, make_contrast
from rlhf_lab.diffing.groups import Groups, coarse_groups
from rlhf_lab.diffing.logit_shift import ends_of, split_shift
from rlhf_lab.diffing.patching import PatchPlace, Side, patch_activations
from rlhf_lab.diffing.weight_line import shift_by_weights
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.residual_parts import SITES, residual_components
from rlhf_lab.training.capture import capture_activations

PartMethod = Literal["split", "weights", "patching"]
PART_METHODS: tuple[PartMethod, ...] = get_args(PartMethod)  # the second takes most of the time


def layer_groups(model: HookedModel) -> Groups:
    """Return `coarse_groups` with the final norm and the unembedding as one group."""
    groups = coarse_groups(model)
    *names, _, _ = groups.names
    *parts, norm, unembed = groups.parts
    return Groups([*names, "read-out"], [*parts, [*norm, *unembed]])


def effects_of_parts(
    model0: HookedModel,
    model1: HookedModel,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    words: Words,
    methods: Sequence[PartMethod] = PART_METHODS,
) -> dict[str, Float[Tensor, "part batch"]]:
    """Measure the effect of each of `layer_groups` on the shift of a logit difference.

    1. "split": "own weights" and "inherited", by `split_shift`, from outputs at `pos`. The effect
       of the norm's scale is in neither, so they do not sum to the shift.
    2. "weights": "by weights", by `shift_by_weights`, at all positions.
    3. "patching": "patched in", the base with the component's output of the tuned model at all
       positions; and "patched out", the loss of the tuned model with the base's output.

    The unembedding has no output: its effect is the shift that the residual stream does not bring.

    Raises:
        ConfigError: If the models differ in parameters, the logits are not a sum over components,
            or a method is unknown.
    """
    unknown = set(methods) - set(PART_METHODS)
    if unknown:
        raise ConfigError(f"Unknown methods {sorted(unknown)}. Choose from {PART_METHODS}.")
    groups, contrast, found = layer_groups(model0), make_contrast(model0, words), {}
    if "split" in methods:
        split = _split_by_group((model0, model1), tokens, pos, contrast, groups.names).cpu()
        found |= dict(zip(("own weights", "inherited"), split, strict=True))
    if "weights" in methods:
        by_weights = shift_by_weights(model0, model1, tokens, pos, contrast, groups)
        found["by weights"] = by_weights.cpu()
    if "patching" in methods:
        last = f"blocks.{model0.cfg.n_layers - 1}.hook_resid_post"
        sites = [_output_site(name) for name in groups.names[:-1]]
        places = {site: PatchPlace(site) for site in [*sites, last]}
        sides = Side(model0, tokens), Side(model1, tokens)
        into = patch_activations(*sides, places, pos, contrast)
        out = patch_activations(*sides[::-1], places, pos, contrast)
        patched_in, patched_out = into.patched - into.start, out.start - out.patched
        patched_in[-1] = out.patched[-1] - out.end
        patched_out[-1] = into.end - into.patched[-1]
        found |= {"patched in": patched_in.cpu(), "patched out": patched_out.cpu()}
    return found


def _output_site(group: str) -> str:
    if group == "embed":
        return "blocks.0.hook_resid_pre"  # with the positions
    layer, kind = group[1:].split()
    return f"blocks.{layer}.hook_{kind}_out"


def _split_by_group(
    models: tuple[HookedModel, HookedModel],
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    words: Words,
    names: list[str],
) -> Float[Tensor, "2 part batch"]:
    acts = tuple(capture_activations(model, tokens, SITES, pos) for model in models)
    ends = ends_of(models, acts, tokens, pos, words)
    causes = split_shift(*ends, is_centered(models[0].ln_final))
    components, _ = residual_components(models[0], acts[0])
    owners = [re.sub(r"^(L\d+)(H\d+| b_O)$", r"\1 attn", name) for name in components]
    owners = ["embed" if owner == "pos_embed" else owner for owner in owners]
    rows = [[i for i, owner in enumerate(owners) if owner == name] for name in names[:-1]]
    sums = [
        torch.stack([cause[row].sum(0) for row in rows])
        for cause in (causes.own_weights, causes.inherited)
    ]
    unembedding = causes.read_out.sum(0)[None]
    last = unembedding, torch.zeros_like(unembedding)
    return torch.stack([torch.cat(each) for each in zip(sums, last, strict=True)])
