"""Residual stream components: the vectors of heads, MLPs and embeddings that sum to its end."""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.transformer_lens import HookedTransformer, why_not_additive

PART_SITES = ("hook_*embed", "blocks.*.attn.hook_z", "blocks.*.hook_mlp_out")
"""The first stands for hook_embed and, where positions are embedded, hook_pos_embed."""
SITES = (*PART_SITES, "ln_final.hook_scale", "logits")


def residual_components(
    model: HookedTransformer, acts: dict[str, Tensor]
) -> tuple[list[str], Float[Tensor, "component batch d_model"]]:
    """Everything that is added into the residual stream at one position.

    1. Token embedding, and position embedding where there is one.
    2. Of each block: every head's z W_O, the output bias of its attention, its MLP.

    They sum to the residual after the last block.

    Raises:
        ConfigError: they do not, or the logits are no sum over them.
    """
    refuse_sums(model)
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


def refuse_sums(model: HookedTransformer, probe: str = "logit_shift") -> None:
    """Raise ConfigError, for a probe, where logits are no sum over a model's heads and MLPs."""
    why = why_not_additive(model)
    if why is not None:
        raise ConfigError(
            f"the model's logits are no sum over its heads and MLPs, since {why}; leave out "
            f"{probe}, and look at the residual stream."
        )


def single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The id of a text that is one token.

    Raises:
        ConfigError: it is not, or the tokenizer does not know it and has no token for such words.
    """
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer cannot read {text!r} ({error}); use words of its vocabulary."
        ) from None
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ConfigError(f"{text!r} is not one token of this tokenizer; choose another word.")
    return ids[0]
