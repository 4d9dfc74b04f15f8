"""Llama, Mistral, Qwen 2, Qwen 3 and Phi-3: RMS norms, rotary positions and gated MLPs."""

from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from rlhf_lab.models.transformer_lens.families.positions import head_size, rotary
from rlhf_lab.models.transformer_lens.families.table import (
    Family,
    Piece,
    Place,
    activation,
    fields,
    refuse,
    same,
    turned,
)

MATRIX_IN = "(head d_head) d_model -> head d_model d_head"
MATRIX_OUT = "d_model (head d_head) -> head d_head d_model"
BIAS_IN = "(head d_head) -> head d_head"
DECODER_FIELDS = fields(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings"
)


def decoder_settings(
    config: PreTrainedConfig, act_field: str = "hidden_act", partial_rotary: bool = False
) -> dict[str, Any]:
    """The sizes, norms, positions and gated MLPs that these architectures share."""
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if n_heads % n_kv_heads:
        refuse(config, "num_key_value_heads", f"a divisor of its {n_heads} heads")
    return rotary(config, partial_rotary) | {
        "d_model": config.hidden_size,
        "d_head": head_size(config),
        "n_heads": n_heads,
        "n_key_value_heads": None if n_kv_heads == n_heads else n_kv_heads,
        "d_mlp": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "d_vocab": config.vocab_size,
        "eps": config.rms_norm_eps,
        "act_fn": activation(config, act_field),
        "normalization_type": "RMS",
        "final_rms": True,
        "gated_mlp": True,
    }


def heads_of(config: PreTrainedConfig) -> dict[str, tuple[str, int]]:
    """Of queries, keys and values: the letter in a hooked model's names, and how many heads."""
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    own = "" if n_heads == n_kv_heads else "_"
    return {"q": ("", n_heads), "k": (own, n_kv_heads), "v": (own, n_kv_heads)}


def attention_places(config: PreTrainedConfig, layer: int, biases: str = "") -> list[Place]:
    """The four matrices of one layer's attention.

    Args:
        biases: which of q, k, v and o have one.
    """
    theirs, ours = f"model.layers.{layer}.self_attn", f"blocks.{layer}.attn"
    places = []
    for letter, (own, n_heads) in heads_of(config).items():
        heads, name = {"head": n_heads}, letter.upper()
        weight = Piece(f"{ours}.{own}W_{name}", MATRIX_IN, heads)
        places.append(Place(f"{theirs}.{letter}_proj.weight", (weight,)))
        if letter in biases:
            bias = Piece(f"{ours}.{own}b_{name}", BIAS_IN, heads)
            places.append(Place(f"{theirs}.{letter}_proj.bias", (bias,)))
    out = Piece(f"{ours}.W_O", MATRIX_OUT, {"head": config.num_attention_heads})
    places.append(Place(f"{theirs}.o_proj.weight", (out,)))
    if "o" in biases:
        places.append(same(f"{theirs}.o_proj.bias", f"{ours}.b_O"))
    return places


def mlp_places(layer: int) -> list[Place]:
    """The three matrices of one layer's gated MLP."""
    theirs, ours = f"model.layers.{layer}.mlp", f"blocks.{layer}.mlp"
    names = {"gate_proj": "W_gate", "up_proj": "W_in", "down_proj": "W_out"}
    return [turned(f"{theirs}.{a}.weight", f"{ours}.{b}") for a, b in names.items()]


def norm_places(layer: int, names: dict[str, str], shift: float = 0.0) -> list[Place]:
    """Norms of one layer, by their names in both."""
    theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
    return [same(f"{theirs}.{a}.weight", f"{ours}.{b}.w", shift=shift) for a, b in names.items()]


def outer_places(scale: float = 1.0, shift: float = 0.0) -> list[Place]:
    """The embedding, the final norm and the unembedding."""
    return [
        same("model.embed_tokens.weight", "embed.W_E", scale=scale),
        same("model.norm.weight", "ln_final.w", shift=shift),
        turned("lm_head.weight", "unembed.W_U"),
    ]


PRE_NORMS = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
HEAD_NORMS = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}


def _places(
    config: PreTrainedConfig, biases: str | None = None, head_norms: bool = False
) -> list[Place]:
    """All weights; `biases` are q, k, v and o where attention_bias says so, when None."""
    if biases is None:
        biases = "qkvo" if getattr(config, "attention_bias", False) else ""
    places = outer_places()
    for layer in range(config.num_hidden_layers):
        places += attention_places(config, layer, biases) + mlp_places(layer)
        places += norm_places(layer, PRE_NORMS | (HEAD_NORMS if head_norms else {}))
    return places


def _phi3_places(config: PreTrainedConfig) -> list[Place]:
    """Queries, keys and values are one matrix here, and so are gate and input."""
    places = outer_places()
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        pieces = [
            Piece(
                f"{ours}.attn.{own}W_{letter.upper()}",
                MATRIX_IN,
                {"head": n_heads},
                share=n_heads * head_size(config),
            )
            for letter, (own, n_heads) in heads_of(config).items()
        ]
        gated = [
            Piece(f"{ours}.mlp.{name}", "d_out d_in -> d_in d_out", share=config.intermediate_size)
            for name in ("W_gate", "W_in")
        ]
        out = Piece(f"{ours}.attn.W_O", MATRIX_OUT, {"head": config.num_attention_heads})
        places += [
            Place(f"{theirs}.self_attn.qkv_proj.weight", tuple(pieces)),
            Place(f"{theirs}.self_attn.o_proj.weight", (out,)),
            Place(f"{theirs}.mlp.gate_up_proj.weight", tuple(gated)),
            turned(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.W_out"),
            *norm_places(layer, PRE_NORMS),
        ]
    return places


LLAMA = Family(
    "LlamaForCausalLM",
    converted=fields("hidden_act attention_bias head_dim", DECODER_FIELDS),
    idle=fields("pretraining_tp"),
    only={"mlp_bias": (False,)},
    settings=decoder_settings,
    places=_places,
)
MISTRAL = Family(
    "MistralForCausalLM",
    converted=fields("hidden_act sliding_window head_dim", DECODER_FIELDS),
    settings=decoder_settings,
    places=partial(_places, biases=""),
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    converted=fields(
        "hidden_act use_sliding_window sliding_window max_window_layers layer_types", DECODER_FIELDS
    ),
    settings=decoder_settings,
    places=partial(_places, biases="qkv"),
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    converted=fields("attention_bias head_dim", QWEN2.converted),
    settings=lambda config: decoder_settings(config) | {"use_qk_norm": True},
    places=partial(_places, head_norms=True),
)
PHI3 = Family(
    "Phi3ForCausalLM",
    converted=fields("hidden_act sliding_window original_max_position_embeddings", DECODER_FIELDS),
    idle=fields("resid_pdrop embd_pdrop"),
    settings=partial(decoder_settings, partial_rotary=True),
    places=_phi3_places,
)
