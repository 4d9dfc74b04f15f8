"""Configuration of a `HookedTransformer`, with the field names of TransformerLens."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Rotary = tuple[Float[Tensor, " pair"], float]
"""Angle per position of each pair of dimensions, and the factor of the cosines and sines."""


@dataclass
class ModelConfig:
    """Sizes and architecture of a transformer. The defaults describe GPT-2.

    Args:
        n_key_value_heads: number of key and value heads if several query heads share one.
        attn_types: "global" or "local" for each layer; None if all are global. Local layers attend
            to the last `window_size` tokens.
        normalization_type: "LN" or "RMS".
        use_normalization_before_and_after: also normalize the outputs of attention and MLP (Gemma).
        norms_after: normalize only the outputs of attention and MLP (OLMo 2).
        qk_norm: "head" normalizes the queries and keys of each head (Qwen 3), "all" those of all
            heads together (OLMo 2).
        rotary_frequencies: `Rotary` of "global" and "local" layers; from `rotary_base` if missing.
        attn_scale: attention scores are divided by it; sqrt(d_head) by default.
        attn_scores_soft_cap, output_logits_soft_cap: cap of x -> cap * tanh(x / cap) if positive.
    """

    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int
    d_vocab: int = -1
    n_heads: int = -1
    n_key_value_heads: int | None = None
    d_mlp: int = -1
    act_fn: str = "gelu_new"
    gated_mlp: bool = False
    normalization_type: str = "LN"
    eps: float = 1e-5
    attn_scale: float = -1.0
    scale_attn_by_inverse_layer_idx: bool = False
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    attn_types: list[str] | None = None
    window_size: int | None = None
    parallel_attn_mlp: bool = False
    use_normalization_before_and_after: bool = False
    norms_after: bool = False
    qk_norm: str | None = None
    positional_embedding_type: str = "standard"
    rotary_dim: int = -1
    rotary_base: float = 10000.0
    rotary_frequencies: dict[str, Rotary] = field(default_factory=dict)
    original_architecture: str | None = None
    model_name: str = "custom"
    init_weights: bool = True
    initializer_range: float = -1.0
    seed: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    attn_only: bool = False  # read by TransformerLens's ActivationCache

    def __post_init__(self) -> None:
        if self.n_heads == -1:
            self.n_heads = self.d_model // self.d_head
        if self.d_mlp == -1:
            self.d_mlp = 4 * self.d_model
        if self.attn_scale == -1:
            self.attn_scale = self.d_head**0.5
        if self.initializer_range == -1:
            self.initializer_range = 0.8 / self.d_model**0.5
        if self.rotary_dim == -1:
            self.rotary_dim = self.d_head

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def layer_type(self, layer: int) -> str:
        """Return "global" or "local"."""
        return "global" if self.attn_types is None else self.attn_types[layer]

    def rotary_by_layer_type(self) -> dict[str, Rotary]:
        """Return the frequencies of the global and the local layers, in float32."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        default = self.rotary_base**-exponents, 1.0
        rotary = {kind: self.rotary_frequencies.get(kind, default) for kind in ("global", "local")}
        return {kind: (frequencies.float(), scale) for kind, (frequencies, scale) in rotary.items()}
