"""KV cache: the keys and values of earlier tokens, one entry per layer."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Keys = Float[Tensor, "batch key kv_head d_head"]
NewKeys = Float[Tensor, "batch new kv_head d_head"]


class LayerCache:
    """Keys and values of the earlier tokens in one layer."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.past_keys: Keys | None = None  # with room for more than `n_tokens`
        self.past_values: Keys | None = None
        self.qkv_projection: tuple[Tensor, Tensor] | None = None  # see `Attention`; built once

    def append(self, keys: NewKeys, values: NewKeys) -> tuple[Keys, Keys]:
        """Store the keys and values of new tokens and return those of all tokens."""
        start, self.n_tokens = self.n_tokens, self.n_tokens + keys.shape[1]
        if self.past_keys is None:
            self.past_keys, self.past_values = keys, values
            return keys, values
        if self.past_keys.shape[1] < self.n_tokens:
            past, room = (self.past_keys, self.past_values), (0, 0, 0, 0, 0, self.n_tokens)
            self.past_keys, self.past_values = (F.pad(x, room) for x in past)
        self.past_keys[:, start : self.n_tokens] = keys
        self.past_values[:, start : self.n_tokens] = values
        return self.past_keys[:, : self.n_tokens], self.past_values[:, : self.n_tokens]


class KVCache:
    """The earlier tokens of a model: one `LayerCache` per layer, and which tokens are padding."""

    def __init__(self, n_layers: int) -> None:
        self.entries = [LayerCache() for _ in range(n_layers)]
        self.previous_attention_mask: Bool[Tensor, "batch pos"] | None = None  # without padding

    @property
    def n_tokens(self) -> int:
        return self.entries[0].n_tokens

    def append_mask(
        self, mask: Bool[Tensor, "batch new"] | None, tokens: Int[Tensor, "batch new"]
    ) -> Bool[Tensor, "batch pos"] | None:
        """Store the mask of new tokens and return that of all tokens, None without padding."""
        before = self.previous_attention_mask
        if mask is not None or before is not None:
            ones = tokens.new_ones(len(tokens), self.n_tokens + tokens.shape[1], dtype=torch.bool)
            before = ones[:, : self.n_tokens] if before is None else before
            mask = ones[:, self.n_tokens :] if mask is None else mask
            self.previous_attention_mask = torch.cat([before, mask], 1)
        return self.previous_attention_mask
