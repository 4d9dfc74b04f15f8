"""The reference model: a frozen copy of the policy's transformer, kept as residuals, not logits."""

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.models.device import autocast
from rlhf_lab.models.lora import effective_weights
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.transformer_lens import HookedTransformer, KVCache, final_residual


def frozen_copy(model: HookedTransformer) -> HookedTransformer:
    """A deep copy in eval mode, without gradients and without the hooks of the original."""
    reference = copy.deepcopy(model)
    reference.reset_hooks(including_permanent=True)
    return reference.requires_grad_(False).eval()


def trainable_copy(model: HookedTransformer) -> HookedTransformer:
    """A copy to train on its own, without the hooks of the original.

    Weights that can be trained are copied; those that are frozen are shared.
    """
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    copied = copy.deepcopy(model, frozen)
    copied.reset_hooks(including_permanent=True)
    return copied


def final_residuals(
    model: HookedTransformer,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
    dtype: torch.dtype | None = None,
    padded: bool | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """The residual stream after the last block, through the hooked modules.

    It is what is worth keeping of the reference: d_model numbers per token instead of d_vocab
    logits.

    Args:
        attention_mask: False on padding to the left of a prompt.
        dtype: of the matrix products; the model's own when None.
        padded: see `run_left_padded`.
    """

    def run(tokens: Int[Tensor, "batch seq"]) -> tuple[Float[Tensor, "batch seq d_model"]]:
        with autocast(tokens.device, dtype):
            return (final_residual(model, tokens),)

    return run_left_padded(run, input_ids, attention_mask, padded)[0]


def same_weights(model: HookedTransformer, reference: HookedTransformer) -> bool:
    """Whether two models use the same weights, bit for bit, with what adapters add to them."""
    own, other = effective_weights(model), effective_weights(reference)
    smallest_first = sorted(own, key=lambda name: own[name].numel())
    return own.keys() == other.keys() and all(
        torch.equal(own[name], other[name]) for name in smallest_first
    )


def normalized_residuals(
    model: HookedTransformer,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Int[Tensor, "batch seq"],
    past_kv_cache: KVCache | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """The input of a head hooked to `ln_final.hook_normalized`, without the unembedding.

    Every hook up to there fires. The mask is TransformerLens's own: no padding on the left.
    """
    heard: list[Tensor] = []
    listen = lambda normalized, hook: heard.append(normalized)
    with model.hooks(fwd_hooks=[("ln_final.hook_normalized", listen)]):
        model.ln_final(final_residual(model, input_ids, attention_mask, past_kv_cache))
    return heard[0]
