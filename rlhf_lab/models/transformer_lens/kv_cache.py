"""KV cache: keys and values of earlier tokens, one entry for each layer."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as KVCache


def empty_cache(cfg: Any, device: torch.device | str, batch_size: int) -> KVCache:
    """A cache without tokens, for a model with this configuration."""
    return KVCache.init_cache(cfg, device, batch_size)


def join_caches(first: KVCache, second: KVCache) -> KVCache:
    """One cache with the layers of two models; the mask of earlier tokens is the first's."""
    return dataclasses.replace(first, entries=first.entries + second.entries)


def split_cache(cache: KVCache, n_layers: int) -> tuple[KVCache, KVCache]:
    """The parts of a cache that `join_caches` made for two models of so many layers each.

    Each part notes the mask of the tokens that it is fed on its own.
    """
    if len(cache.entries) != 2 * n_layers:
        raise ValueError(
            f"past_kv_cache has {len(cache.entries)} layers for a policy and a critic of "
            f"{n_layers} each; make it with init_cache(policy, batch_size)."
        )
    first, second = cache.entries[:n_layers], cache.entries[n_layers:]
    return dataclasses.replace(cache, entries=first), dataclasses.replace(cache, entries=second)


def share_mask(cache: KVCache, part: KVCache) -> None:
    """Let a cache of two models know the mask of the tokens that a part of it was fed."""
    cache.previous_attention_mask = part.previous_attention_mask


def pick_rows(cache: KVCache, rows: Int[Tensor, " batch"]) -> None:
    """Let row i of a cache be what row `rows[i]` was, in place."""
    for entry in cache.entries:
        entry.past_keys = entry.past_keys[rows]
        entry.past_values = entry.past_values[rows]
    cache.previous_attention_mask = cache.previous_attention_mask[rows]
