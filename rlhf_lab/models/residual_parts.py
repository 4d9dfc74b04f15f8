"""Residual stream components: vectors of heads, MLPs and embeddings that sum to its end."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel

PART_SITES = ("hook_*embed", "blocks.*.attn.hook_z", "blocks.*.hook_mlp_out")
SITES = (*PART_SITES, "ln_final.hook_scale", "logits")


def residual_components(
    model: HookedModel, acts: dict[str, Tensor]
) -> tuple[list[str], Float[Tensor, "component batch d_model"]]:
    """Return the names and vectors at one position of all parts of the last residual stream."""
    validate_additive(model)
    names, parts = ["embed"], [acts["hook_embed"].double()]
    if "hook_pos_embed" in acts:
        names.append("pos_embed")
        parts.append(acts["hook_pos_embed"].double())
    for layer, block in enumerate(model.blocks):
        z = acts[f"blocks.{layer}.attn.hook_z"].double()
        heads = torch.einsum("bhd,hdm->hbm", z, block.attn.W_O.double())
        names += [f"L{layer}H{head}" for head in range(len(heads))]
        parts += list(heads)
        names += [f"L{layer} b_O", f"L{layer} mlp"]
        parts.append(block.attn.b_O.double().expand_as(parts[0]))
        parts.append(acts[f"blocks.{layer}.hook_mlp_out"].double())
    return names, torch.stack(parts)


def reason_not_additive(model: HookedModel) -> str | None:
    """Return why the logits are not a sum over heads and MLPs; None for a sum."""
    cfg = model.cfg
    if cfg.use_normalization_before_and_after or getattr(cfg, "norms_after", False):
        return "its blocks normalize the output of attention before it is added"
    if (cfg.output_logits_soft_cap or 0) > 0:
        return f"its logits are capped at {cfg.output_logits_soft_cap:g}"
    return None


def validate_additive(model: HookedModel, probe: str = "logit_shift") -> None:
    """Raise ConfigError if the logits are not a sum over the model's heads and MLPs."""
    why = reason_not_additive(model)
    if why is not None:
        raise ConfigError(
            f"The model's logits are not a sum over its heads and MLPs: {why}. Remove {probe}, and "
            "look at the residual stream."
        )
