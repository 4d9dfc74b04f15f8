"""The protocol that every transformer of the package has, and functions on such a model.

`HookedTransformer` of this package has it, and so has the class of that name in TransformerLens 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lab.models.hooked_transformer import HookedTransformer, soft_cap
from rlhf_lab.models.kv_cache import KVCache
from rlhf_lab.models.model_config import ModelConfig

HOOK_STATE = ("fwd_hooks", "bwd_hooks", "context_level")
"""Attributes in which TransformerLens stores hooks, on a hook point or a model."""
FORWARD = HookedTransformer.forward
NamedHook = tuple[str, Callable[..., Tensor | None]]


@runtime_checkable
class HookedModel(Protocol):
    """A transformer with TransformerLens's names for its parts, hook points and `cfg` fields."""

    cfg: Any
    tokenizer: PreTrainedTokenizerBase | None
    blocks: nn.ModuleList
    ln_final: nn.Module
    unembed: nn.Module
    hook_dict: dict[str, nn.Module]

    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        """Compute logits; see `HookedTransformer.forward` for the options that are used."""

    def hooks(
        self, fwd_hooks: Sequence[NamedHook] = (), bwd_hooks: Sequence[NamedHook] = ()
    ) -> AbstractContextManager:
        """Register hooks by name until the context ends."""

    def reset_hooks(self, including_permanent: bool = False) -> None:
        """Remove all hooks."""


def make_model(tokenizer: PreTrainedTokenizerBase | None = None, **sizes: Any) -> HookedTransformer:
    """Return a transformer with random weights.

    Args:
        sizes: fields of `ModelConfig`, such as `n_layers=2, d_model=16, n_ctx=32, d_head=8,
            d_vocab=100, seed=0`.
    """
    return HookedTransformer(ModelConfig(**sizes), tokenizer).to(sizes.get("device", "cpu"))


def final_residual(
    model: HookedModel,
    tokens: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
    cache: Any = None,
) -> Float[Tensor, "batch seq d_model"]:
    """Compute the residual stream after the last block.

    Args:
        attention_mask: False on padding; None without padding.
        cache: earlier tokens (see `empty_cache`).
    """
    if not isinstance(model, HookedTransformer):  # TransformerLens guesses a mask from the tokens
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        attention_mask = mask.long()
    n_layers, options = model.cfg.n_layers, dict(past_kv_cache=cache)
    return model(tokens, attention_mask=attention_mask, stop_at_layer=n_layers, **options)


def unembed(
    model: HookedModel, hidden: Float[Tensor, "batch seq d_model"]
) -> Float[Tensor, "batch seq d_vocab"]:
    """Compute the logits of the final normalized residual stream."""
    return soft_cap(model.unembed(hidden), model.cfg.output_logits_soft_cap)


def final_logits(
    model: HookedModel, residual: Float[Tensor, "batch seq d_model"]
) -> Float[Tensor, "batch seq d_vocab"]:
    """Compute the logits of the residual stream after the last block."""
    return unembed(model, model.ln_final(residual))


def has_custom_forward(model: HookedModel) -> bool:
    """Return True if `forward` was replaced, so that logits may not follow from the residual."""
    kind = type(model)
    is_known = kind.forward is FORWARD or kind.__module__.startswith("transformer_lens.")
    return "forward" in vars(model) or not is_known


def empty_cache(model: HookedModel, batch_size: int) -> Any:
    """Return a KV cache without tokens for this model."""
    if isinstance(model, HookedTransformer):
        return KVCache.empty(model.cfg.n_layers)
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    return TransformerLensKeyValueCache.init_cache(
        model.cfg, next(model.parameters()).device, batch_size
    )


def select_cache_rows(cache: Any, rows: Int[Tensor, " batch"]) -> None:
    """Replace row i of a cache by row `rows[i]`, in place."""
    for entry in cache.entries:
        entry.past_keys, entry.past_values = entry.past_keys[rows], entry.past_values[rows]
    if cache.previous_attention_mask is not None:
        cache.previous_attention_mask = cache.previous_attention_mask[rows]


def named_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every transformer block within a module."""
    for name, part in module.named_modules():
        if type(part).__name__ == "TransformerBlock":
            yield name, part


def is_centered(norm: nn.Module) -> bool:
    """Return True for LayerNorm, which subtracts the mean, and False for RMSNorm."""
    return getattr(norm, "is_centered", type(norm).__name__.startswith("LayerNorm"))


def reason_not_additive(model: HookedModel) -> str | None:
    """Return why the logits are not a sum over heads and MLPs; None for a sum.

    They are if the outputs of heads and MLPs are added to the residual stream unchanged, and only
    the final norm, whose scale is known, and the unembedding follow.
    """
    cfg = model.cfg
    if cfg.use_normalization_before_and_after or getattr(cfg, "norms_after", False):
        return "its blocks normalize the output of attention before it is added"
    if (cfg.output_logits_soft_cap or 0) > 0:
        return f"its logits are capped at {cfg.output_logits_soft_cap:g}"
    return None
