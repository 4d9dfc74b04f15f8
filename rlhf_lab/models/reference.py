"""The reference: a frozen copy of the policy's transformer, kept as residuals, not logits."""

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import HookedTransformer

from rlhf_lab.models.padding import run_left_padded


def frozen_copy(model: HookedTransformer) -> HookedTransformer:
    """A deep copy in eval mode, without gradients and without the hooks of the original."""
    reference = copy.deepcopy(model)
    reference.reset_hooks(including_permanent=True)
    return reference.requires_grad_(False).eval()


def final_residuals(
    model: HookedTransformer,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """The residual stream after the last block.

    It is what is worth keeping of the reference: d_model numbers per token instead of d_vocab
    logits.
    """

    def run(tokens: Int[Tensor, "batch seq"]) -> tuple[Float[Tensor, "batch seq d_model"]]:
        all_real = torch.ones_like(tokens)
        return (model(tokens, attention_mask=all_real, stop_at_layer=model.cfg.n_layers),)

    return run_left_padded(run, input_ids, attention_mask)[0]


def read_out(
    model: HookedTransformer, residuals: Float[Tensor, "batch gen d_model"]
) -> Float[Tensor, "batch gen d_vocab"]:
    """Logits of the residuals that `final_residuals` gave: the final norm, then the unembedding."""
    return model.unembed(model.ln_final(residuals))
