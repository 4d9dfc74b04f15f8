"""The hooked transformer and its hook points, as the installed TransformerLens has them."""

import warnings
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import PreTrainedTokenizerBase

from rlhf_lab.models.transformer_lens.kv_cache import KVCache

FORWARD = HookedTransformer.forward
HOOK_STATE = ("fwd_hooks", "bwd_hooks", "context_level")
"""What the library notes of hooks, on a hook point or on the model, beside torch's own tables."""


def make_model(tokenizer: PreTrainedTokenizerBase | None = None, **sizes: Any) -> HookedTransformer:
    """A transformer with fresh random weights.

    Args:
        sizes: the fields of its configuration, such as `n_layers=2, d_model=16, n_ctx=32,
            d_head=8, d_vocab=100, act_fn="gelu_new", seed=0`.
    """
    return construct(HookedTransformerConfig(**sizes), tokenizer)


def construct(
    cfg: HookedTransformerConfig, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
) -> HookedTransformer:
    """Call the constructor, without its warning that TransformerLens 4 will not have the class.

    The installed version is pinned, so that a user of this package has nothing to do about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
        return HookedTransformer(cfg, tokenizer, **options)


def final_residual(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch seq"],
    attention_mask: Int[Tensor, "batch seq"] | None = None,
    cache: KVCache | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """The residual stream after the last block, through the hooked modules.

    Args:
        attention_mask: TransformerLens's own, 1 on real tokens; all of them when None.
        cache: keys and values of earlier tokens; those of these tokens are added.
    """
    mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
    return model(tokens, attention_mask=mask, past_kv_cache=cache, stop_at_layer=model.cfg.n_layers)


def final_logits(
    model: HookedTransformer, residual: Float[Tensor, "batch seq d_model"]
) -> Float[Tensor, "batch seq d_vocab"]:
    """The logits of residuals after the last block: the final norm, the unembedding, a soft cap."""
    return model(residual, start_at_layer=model.cfg.n_layers)


def has_own_forward(model: HookedTransformer) -> bool:
    """Whether the model has a forward of its own, whose logits need not be its last residual's."""
    return "forward" in vars(model) or type(model).forward is not FORWARD


def hook_level(model: HookedTransformer) -> int:
    """How many contexts of hooks the model is within; a hook with this level ends with them."""
    return model.context_level
