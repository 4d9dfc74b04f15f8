"""Configuration of a `HookedTransformer`, with the field names of TransformerLens."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

# angle per position of each pair of dimensions, and the factor of the cosines and sines
Rotary = tuple[Float[Tensor, " pair"], float]


@dataclass
class ModelConfig:
    """Sizes and architecture of a transformer. The defaults describe GPT-2."""

    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int
    d_vocab: int = -1
    n_heads: int = -1
    n_key_value_heads: int | None = None  # if several query heads share one
    d_mlp: int = -1
    act_fn: str = "gelu_new"
    gated_mlp: bool = False
    normalization_type: str = "LN"  # or "RMS"
    eps: float = 1e-5
    attn_scale: float = -1.0  # attention scores are divided by it; sqrt(d_head) by default
    scale_attn_by_inverse_layer_idx: bool = False
    attn_scores_soft_cap: float = -1.0  # c of x -> c tanh(x / c) if positive
    output_logits_soft_cap: float = -1.0
    attn_types: list[str] | None = None  # "global" or "local" for each layer; None: all are global
    window_size: int | None = None  # tokens to which local layers attend, the last ones
    parallel_attn_mlp: bool = False
    use_normalization_before_and_after: bool = False  # also of attention and MLP outputs (Gemma)
    norms_after: bool = False  # only of attention and MLP outputs (OLMo 2)
    qk_norm: str | None = None  # "head": each head (Qwen 3); "all": all heads together (OLMo 2)
    positional_embedding_type: str = "standard"  # or "rotary"
    rotary_dim: int = -1
    rotary_base: float = 10000.0
    rotary_frequencies: dict[str, Rotary] = field(default_factory=dict)  # for "global" and "local"
    original_architecture: str | None = None
    model_name: str = "custom"
    init_weights: bool = True
    initializer_range: float = -1.0
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

    def layer_type(self, layer: int) -> str:
        return "global" if self.attn_types is None else self.attn_types[layer]

    def rotary_by_layer_type(self) -> dict[str, Rotary]:
        """Return the frequencies in float32, computed from `rotary_base` if not set."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        default = self.rotary_base**-exponents, 1.0
        rotary = {kind: self.rotary_frequencies.get(kind, default) for kind in ("global", "local")}
        return {kind: (frequencies.float(), scale) for kind, (frequencies, scale) in rotary.items()}
