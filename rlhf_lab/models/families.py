"""The supported architectures: one `Family` each, whose tables are read in both directions.

To add one, list its modules here and the fields of its configuration in `CONFIG_FIELDS`. Other
fields and tensors are rejected by name. Modules and biases that a model lacks are skipped.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from transformers import GPTNeoXForCausalLM

from rlhf_lab.models.conversion import Family, TensorMap
from rlhf_lab.models.model_config import ModelConfig

TRANSPOSED = "d_out d_in -> d_in d_out"
HEADS_IN = "(head d_head) d_model -> head d_model d_head"
HEADS_BIAS = "(head d_head) -> head d_head"
HEADS_OUT = "d_model (head d_head) -> head d_head d_model"
GPT2_IN = "d_model (head d_head) -> head d_model d_head"
GPT2_OUT = "(head d_head) d_model -> head d_head d_model"
NEOX_IN = "(head part d_head) d_model -> (part head) d_model d_head"
NEOX_BIAS = "(head part d_head) -> (part head) d_head"
PHI3_MLP = "(part d_mlp) d_model -> (part d_model) d_mlp"
QKV = ("attn.W_Q", "attn.W_K", "attn.W_V")


def module(
    theirs: str, *ours: str, pattern: str = "", bias_pattern: str = "", **options: Any
) -> Iterator[TensorMap]:
    """Yield the maps of a module's weight (ours: `W_*` or `w`) and bias (ours: `b_*` or `b`)."""
    biases = (name.replace("W_", "b_") if "W_" in name else f"{name[:-1]}b" for name in ours)
    yield TensorMap(f"{theirs}.weight", ours, pattern, **options)
    yield TensorMap(f"{theirs}.bias", tuple(biases), bias_pattern)


def gpt2(cfg: ModelConfig) -> Iterator[TensorMap]:
    """Learned positions; Q, K and V in one tensor; matrices as [d_in, d_out]."""
    yield from module("transformer.wte", "embed.W_E")
    yield from module("transformer.wpe", "pos_embed.W_pos")
    yield from module("transformer.h.*.ln_1", "ln1.w")
    yield from module("transformer.h.*.attn.c_attn", *QKV, pattern=GPT2_IN, bias_pattern=HEADS_BIAS)
    yield from module("transformer.h.*.attn.c_proj", "attn.W_O", pattern=GPT2_OUT)
    yield from module("transformer.h.*.ln_2", "ln2.w")
    yield from module("transformer.h.*.mlp.c_fc", "mlp.W_in")
    yield from module("transformer.h.*.mlp.c_proj", "mlp.W_out")
    yield from module("transformer.ln_f", "ln_final.w")
    yield from module("lm_head", "unembed.W_U", pattern=TRANSPOSED)


def neox(cfg: ModelConfig) -> Iterator[TensorMap]:
    """Attention and MLP in parallel; in one tensor, each head has its Q, K and V."""
    yield from module("gpt_neox.embed_in", "embed.W_E")
    yield from module("gpt_neox.layers.*.input_layernorm", "ln1.w")
    heads = {"pattern": NEOX_IN, "bias_pattern": NEOX_BIAS}
    yield from module("gpt_neox.layers.*.attention.query_key_value", *QKV, **heads)
    yield from module("gpt_neox.layers.*.attention.dense", "attn.W_O", pattern=HEADS_OUT)
    yield from module("gpt_neox.layers.*.post_attention_layernorm", "ln2.w")
    yield from module("gpt_neox.layers.*.mlp.dense_h_to_4h", "mlp.W_in", pattern=TRANSPOSED)
    yield from module("gpt_neox.layers.*.mlp.dense_4h_to_h", "mlp.W_out", pattern=TRANSPOSED)
    yield from module("gpt_neox.final_layer_norm", "ln_final.w")
    lm_head = next(iter(GPTNeoXForCausalLM._tied_weights_keys))  # renamed in transformers 5.10
    yield from module(lm_head.removesuffix(".weight"), "unembed.W_U", pattern=TRANSPOSED)


LLAMA = {"normalization_type": "RMS", "gated_mlp": True}
PRE_NORMS = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
POST_NORMS = {"post_attention_layernorm": "ln1", "post_feedforward_layernorm": "ln2"}
GEMMA_NORMS = {"input_layernorm": "ln1", "post_attention_layernorm": "ln1_post"}
GEMMA_NORMS |= {"pre_feedforward_layernorm": "ln2", "post_feedforward_layernorm": "ln2_post"}


def llama(
    cfg: ModelConfig, norms: Mapping[str, str] = PRE_NORMS, shift: float = 0.0, scale: float = 1.0
) -> Iterator[TensorMap]:
    """RMSNorm, grouped-query attention, gated MLP."""
    yield from module("model.embed_tokens", "embed.W_E", scale=scale)
    heads = {"pattern": HEADS_IN, "bias_pattern": HEADS_BIAS}
    for name, ours in zip(("q_proj", "k_proj", "v_proj"), qkv_names(cfg), strict=True):
        yield from module(f"model.layers.*.self_attn.{name}", ours, **heads)
    yield from module("model.layers.*.self_attn.q_norm", "attn.q_norm.w", shift=shift)
    yield from module("model.layers.*.self_attn.k_norm", "attn.k_norm.w", shift=shift)
    yield from module("model.layers.*.self_attn.o_proj", "attn.W_O", pattern=HEADS_OUT)
    yield from module("model.layers.*.mlp.gate_proj", "mlp.W_gate", pattern=TRANSPOSED)
    yield from module("model.layers.*.mlp.up_proj", "mlp.W_in", pattern=TRANSPOSED)
    yield from module("model.layers.*.mlp.down_proj", "mlp.W_out", pattern=TRANSPOSED)
    for name, ours in norms.items():
        yield from module(f"model.layers.*.{name}", f"{ours}.w", shift=shift)
    yield from module("model.norm", "ln_final.w", shift=shift)
    yield from module("lm_head", "unembed.W_U", pattern=TRANSPOSED)


def qkv_names(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the names of W_Q, W_K and W_V."""
    return QKV if cfg.n_key_value_heads is None else ("attn.W_Q", "attn._W_K", "attn._W_V")


def phi3(cfg: ModelConfig) -> Iterator[TensorMap]:
    """Llama with Q, K and V in one tensor, and the gate and the input of the MLP in another."""
    separate = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    yield from (row for row in llama(cfg) if row.theirs.split(".")[-2] not in separate)
    n_kv_heads = cfg.n_key_value_heads or cfg.n_heads
    heads = {"pattern": HEADS_IN, "lengths": (cfg.n_heads, n_kv_heads, n_kv_heads)}
    yield from module("model.layers.*.self_attn.qkv_proj", *qkv_names(cfg), **heads)
    yield from module("model.layers.*.mlp.gate_up_proj", "mlp.W_gate", "mlp.W_in", pattern=PHI3_MLP)


def gemma(cfg: ModelConfig) -> Iterator[TensorMap]:
    """Llama with norms before and after attention and MLP, and norm weights stored as w - 1."""
    return llama(cfg, GEMMA_NORMS, shift=1.0, scale=cfg.d_model**0.5)


GEMMA = LLAMA | {"use_normalization_before_and_after": True}
GEMMA2_FIELDS = {"attn_logit_softcapping": "attn_scores_soft_cap"}
OLMO2 = LLAMA | {"qk_norm": "all", "norms_after": True}
FAMILIES = {
    family.architecture: family
    for family in (
        Family("GPT2LMHeadModel", gpt2, folds_unembedding_bias=True),
        Family("GPTNeoXForCausalLM", neox),
        Family("LlamaForCausalLM", llama, LLAMA),
        Family("MistralForCausalLM", llama, LLAMA),
        Family("Qwen2ForCausalLM", llama, LLAMA),
        Family("Qwen3ForCausalLM", llama, LLAMA | {"qk_norm": "head"}),
        Family("Phi3ForCausalLM", phi3, LLAMA),
        Family("Gemma2ForCausalLM", gemma, GEMMA, GEMMA2_FIELDS),
        Family("Gemma3ForCausalLM", gemma, GEMMA | {"qk_norm": "head"}),
        Family("Olmo2ForCausalLM", partial(llama, norms=POST_NORMS), OLMO2),
    )
}
