"""GPT-NeoX (Pythia): attention and MLP side by side, each head's query, key and value together."""

from typing import Any

import transformers
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


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    d_head = config.hidden_size // config.num_attention_heads
    if head_size(config) != d_head:
        refuse(config, "head_dim", f"head_dim={d_head}")
    return rotary(config, partial=True) | {
        "d_model": config.hidden_size,
        "d_head": d_head,
        "n_heads": config.num_attention_heads,
        "d_mlp": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "d_vocab": config.vocab_size,
        "eps": config.layer_norm_eps,
        "act_fn": activation(config, "hidden_act"),
        "parallel_attn_mlp": config.use_parallel_residual,
        "normalization_type": "LN",
    }


def _unembedding() -> str:
    """Its name, embed_out.weight before transformers 5.10 or so, and lm_head.weight since."""
    return next(iter(transformers.GPTNeoXForCausalLM._tied_weights_keys))


def _places(config: PreTrainedConfig) -> list[Place]:
    heads = {"head": config.num_attention_heads}
    fused = heads | {"three": 3}
    d_model = config.hidden_size
    matrix, bias = "(head d_head) d_model -> head d_model d_head", "(head d_head) -> head d_head"
    places = [
        same("gpt_neox.embed_in.weight", "embed.W_E"),
        same("gpt_neox.final_layer_norm.weight", "ln_final.w"),
        same("gpt_neox.final_layer_norm.bias", "ln_final.b"),
        turned(_unembedding(), "unembed.W_U"),
    ]
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"gpt_neox.layers.{layer}", f"blocks.{layer}"
        attention = f"{theirs}.attention"
        for norm, name in (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2")):
            places.append(same(f"{theirs}.{norm}.weight", f"{ours}.{name}.w"))
            places.append(same(f"{theirs}.{norm}.bias", f"{ours}.{name}.b"))
        places += [
            Place(
                f"{attention}.query_key_value.weight",
                tuple(Piece(f"{ours}.attn.W_{x}", matrix, heads, d_model) for x in "QKV"),
                order="(head three d_head) d_model -> (three head d_head) d_model",
                axes=fused,
            ),
            Place(
                f"{attention}.dense.weight",
                (Piece(f"{ours}.attn.W_O", "d_model (head d_head) -> head d_head d_model", heads),),
            ),
            turned(f"{theirs}.mlp.dense_h_to_4h.weight", f"{ours}.mlp.W_in"),
            same(f"{theirs}.mlp.dense_h_to_4h.bias", f"{ours}.mlp.b_in"),
            turned(f"{theirs}.mlp.dense_4h_to_h.weight", f"{ours}.mlp.W_out"),
            same(f"{theirs}.mlp.dense_4h_to_h.bias", f"{ours}.mlp.b_out"),
        ]
        if config.attention_bias:
            places += [
                Place(
                    f"{attention}.query_key_value.bias",
                    tuple(Piece(f"{ours}.attn.b_{x}", bias, heads, d_model) for x in "QKV"),
                    order="(head three d_head) -> (three head d_head)",
                    axes=fused,
                ),
                same(f"{attention}.dense.bias", f"{ours}.attn.b_O"),
            ]
    return places


NEOX = Family(
    "GPTNeoXForCausalLM",
    converted=fields(
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
        "max_position_embeddings layer_norm_eps use_parallel_residual rope_parameters "
        "attention_bias tie_word_embeddings"
    ),
    idle=fields("hidden_dropout classifier_dropout"),
    settings=_settings,
    places=_places,
)
