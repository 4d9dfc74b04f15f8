"""Tiny random models of every architecture that is loaded, with unusual values in each setting."""

from typing import Any

import pytest
import torch
import transformers
from torch.torch_version import TorchVersion
from transformers import PreTrainedModel

from tests.tiny_models import randomize

CONTEXT, WINDOW = 40, 5
SPECIAL = dict(bos_token_id=1, eos_token_id=2, pad_token_id=3)
SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=3)
SIZES |= dict(num_attention_heads=4, max_position_embeddings=CONTEXT)
GROUPED = dict(num_key_value_heads=2, rms_norm_eps=1e-3)
SOME_WINDOWS = dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Return rotary embeddings with another base, and a scaling."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


GPT2 = dict(vocab_size=24, n_positions=CONTEXT, n_embd=16, n_layer=3, n_head=4, n_inner=24)
GPT2 |= dict(activation_function="gelu", layer_norm_epsilon=1e-3)
GEMMA = GROUPED | dict(head_dim=6, sliding_window=WINDOW, query_pre_attn_scalar=11)
GEMMA |= dict(final_logit_softcapping=4.0, hidden_activation="gelu", attention_bias=True)
GEMMA |= dict(layer_types=MIXED)
GEMMA3_BASES = {
    "full_attention": dict(rope_type="linear", factor=3.0, rope_theta=900.0),
    "sliding_attention": dict(rope_type="default", rope_theta=50.0),
}
BIASED = GROUPED | dict(attention_bias=True, hidden_act="gelu") | rope(500.0)
# settings by the name of the class; others are varied in `VARIANTS`
TINY: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT2 | dict(scale_attn_by_inverse_layer_idx=True),
    "GPTNeoXForCausalLM": dict(layer_norm_eps=1e-3, hidden_act="gelu_new")
    | rope(500.0, partial_rotary_factor=0.5),
    "LlamaForCausalLM": BIASED | dict(head_dim=6),
    "MistralForCausalLM": GROUPED | dict(head_dim=6, sliding_window=WINDOW) | rope(500.0),
    "Qwen2ForCausalLM": GROUPED | SOME_WINDOWS | dict(tie_word_embeddings=True) | rope(500.0),
    "Qwen3ForCausalLM": GROUPED
    | SOME_WINDOWS
    | dict(head_dim=6, attention_bias=True)
    | rope(500.0),
    "Phi3ForCausalLM": GROUPED
    | dict(sliding_window=WINDOW)
    | rope(500.0, partial_rotary_factor=0.5),
    "Gemma2ForCausalLM": GEMMA | dict(attn_logit_softcapping=2.0) | rope(500.0),
    "Gemma3ForCausalLM": GEMMA | dict(rope_parameters=GEMMA3_BASES),
    "Olmo2ForCausalLM": BIASED,
}
LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=20)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=30)
YARN_SET = YARN | dict(attention_factor=1.3, beta_fast=4.0, beta_slow=0.5, truncate=False)
LONGROPE = dict(rope_type="longrope", short_factor=[1.0, 1.0], long_factor=[2.0, 3.0])
LONGROPE |= dict(original_max_position_embeddings=16, partial_rotary_factor=1.0)
GEMMA3_YARN = YARN | dict(rope_theta=100.0, attention_factor=1.3)
GEMMA3_LLAMA3 = GEMMA3_BASES | {"full_attention": LLAMA3 | dict(rope_theta=100.0)}
GEMMA3_LONGROPE = dict(full_attention=LONGROPE | dict(rope_theta=100.0))
GEMMA3_LONGROPE |= dict(sliding_attention=dict(rope_type="dynamic", factor=3.0, rope_theta=50.0))
PLAIN = dict(tie_word_embeddings=True, num_key_value_heads=4, attention_bias=False)
NO_CAPS = dict(attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False)
HEAD = dict(head_dim=8)
# other values: the family's name in its class, and its settings
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 without a scale": ("GPT2", dict(scale_attn_weights=False)),
    "GPT-2 of plain sizes": (
        "GPT2",
        dict(n_inner=None, scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=False),
    ),
    "NeoX in series": ("GPTNeoX", dict(use_parallel_residual=False, attention_bias=False)),
    "NeoX tied, all of a head turned": (
        "GPTNeoX",
        dict(tie_word_embeddings=True) | rope(1e4, partial_rotary_factor=1.0),
    ),
    "Llama tied, as many keys as queries": ("Llama", PLAIN),
    "Llama, one key head": ("Llama", dict(num_key_value_heads=1, head_dim=None)),
    "Llama, linear": ("Llama", rope(1e4, rope_type="linear", factor=4.0)),
    "Llama 3": ("Llama", HEAD | rope(100.0, **LLAMA3)),
    "Llama, yarn": ("Llama", HEAD | rope(100.0, **YARN)),
    "Llama, yarn, all set": ("Llama", HEAD | rope(100.0, **YARN_SET)),
    "Llama, yarn by mscale": ("Llama", HEAD | rope(100.0, **YARN, mscale=0.7, mscale_all_dim=0.4)),
    "Llama, dynamic": ("Llama", rope(100.0, rope_type="dynamic", factor=4.0)),
    "Mistral without a window": ("Mistral", dict(sliding_window=None)),
    "Mistral, a window of all": ("Mistral", dict(sliding_window=CONTEXT)),
    "Mistral, yarn and a window": ("Mistral", HEAD | rope(100.0, **YARN)),
    "Qwen 2 without windows": ("Qwen2", dict(use_sliding_window=False)),
    "Qwen 2, layers named": ("Qwen2", dict(layer_types=MIXED)),
    "Qwen 3 without windows, tied": (
        "Qwen3",
        dict(use_sliding_window=False, attention_bias=False, tie_word_embeddings=True),
    ),
    "Phi-3 without a window, all turned": (
        "Phi3",
        dict(sliding_window=None) | rope(1e4, partial_rotary_factor=1.0),
    ),
    "Phi-3, long": (
        "Phi3",
        dict(sliding_window=None, original_max_position_embeddings=16) | rope(100.0, **LONGROPE),
    ),
    "Gemma 2 without caps": ("Gemma2", NO_CAPS),
    "Gemma 2, every other layer": ("Gemma2", dict(layer_types=None)),
    "Gemma 3 of 7 layers, untied": (
        "Gemma3",
        dict(layer_types=None, num_hidden_layers=7, tie_word_embeddings=False),
    ),
    "Gemma 3, yarn": (
        "Gemma3",
        HEAD | dict(rope_parameters=GEMMA3_BASES | {"full_attention": GEMMA3_YARN}),
    ),
    "Gemma 3, llama3": ("Gemma3", HEAD | dict(rope_parameters=GEMMA3_LLAMA3)),
    "Gemma 3, longrope": ("Gemma3", dict(head_dim=4, rope_parameters=GEMMA3_LONGROPE)),
    "OLMo 2 with other heads": ("Olmo2", HEAD),
}
CLASSES = {name.removesuffix("LMHeadModel").removesuffix("ForCausalLM"): name for name in TINY}
VARIANTS = {name: (CLASSES[family], x) for name, (family, x) in _VARIANTS.items()}


def random_tokens(rows: int = 3, length: int = CONTEXT) -> torch.Tensor:
    """Return tokens of these models' vocabulary."""
    return torch.randint(24, (rows, length), generator=torch.Generator().manual_seed(1))


def tiny_of(architecture: str, **changes: Any) -> PreTrainedModel:
    """Build a model of an architecture with random, distinct parameters."""
    if architecture == "Gemma2ForCausalLM" and TorchVersion(transformers.__version__) < "5.21":
        pytest.skip("this transformers leaves out the cap of attention scores, and is rejected")
    kind = getattr(transformers, architecture)
    sizes = {} if architecture == "GPT2LMHeadModel" else SIZES
    model = kind(kind.config_class(**(sizes | SPECIAL | TINY[architecture] | changes)))
    randomize(model, seed=4)
    return model.eval()
