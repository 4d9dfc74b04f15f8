"""GPT-2: learned positions, layer norms with biases, queries, keys and values in one matrix."""

from typing import Any

from transformers import PreTrainedConfig

from rlhf_lab.models.transformer_lens.families.table import (
    Family,
    Piece,
    Place,
    activation,
    fields,
    same,
    turned,
)

HEADS_IN = "d_model (head d_head) -> head d_model d_head"


def _n_ctx(config: PreTrainedConfig) -> int:
    """Some configurations name a context shorter than the table of positions."""
    return getattr(config, "n_ctx", config.n_positions)


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    d_model = config.n_embd
    return {
        "d_model": d_model,
        "d_head": d_model // config.n_head,
        "n_heads": config.n_head,
        "d_mlp": config.n_inner or 4 * d_model,
        "n_layers": config.n_layer,
        "n_ctx": _n_ctx(config),
        "eps": config.layer_norm_epsilon,
        "d_vocab": config.vocab_size,
        "act_fn": activation(config, "activation_function"),
        "use_attn_scale": config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "normalization_type": "LN",
    }


def _places(config: PreTrainedConfig) -> list[Place]:
    heads = {"head": config.n_head}
    places = [
        same("transformer.wte.weight", "embed.W_E"),
        Place("transformer.wpe.weight", (Piece("pos_embed.W_pos"),), rows=_n_ctx(config)),
        same("transformer.ln_f.weight", "ln_final.w"),
        same("transformer.ln_f.bias", "ln_final.b"),
        turned("lm_head.weight", "unembed.W_U"),
    ]
    for layer in range(config.n_layer):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        into = [Piece(f"{ours}.attn.W_{x}", HEADS_IN, heads, share=config.n_embd) for x in "QKV"]
        biases = [
            Piece(f"{ours}.attn.b_{x}", "(head d_head) -> head d_head", heads, config.n_embd)
            for x in "QKV"
        ]
        out = "(head d_head) d_model -> head d_head d_model"
        places += [
            same(f"{theirs}.ln_1.weight", f"{ours}.ln1.w"),
            same(f"{theirs}.ln_1.bias", f"{ours}.ln1.b"),
            Place(f"{theirs}.attn.c_attn.weight", tuple(into), dim=1),
            Place(f"{theirs}.attn.c_attn.bias", tuple(biases)),
            Place(f"{theirs}.attn.c_proj.weight", (Piece(f"{ours}.attn.W_O", out, heads),)),
            same(f"{theirs}.attn.c_proj.bias", f"{ours}.attn.b_O"),
            same(f"{theirs}.ln_2.weight", f"{ours}.ln2.w"),
            same(f"{theirs}.ln_2.bias", f"{ours}.ln2.b"),
            same(f"{theirs}.mlp.c_fc.weight", f"{ours}.mlp.W_in"),
            same(f"{theirs}.mlp.c_fc.bias", f"{ours}.mlp.b_in"),
            same(f"{theirs}.mlp.c_proj.weight", f"{ours}.mlp.W_out"),
            same(f"{theirs}.mlp.c_proj.bias", f"{ours}.mlp.b_out"),
        ]
    return places


GPT2 = Family(
    "GPT2LMHeadModel",
    converted=fields(
        "vocab_size n_positions n_ctx n_embd n_layer n_head n_inner activation_function "
        "layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx tie_word_embeddings"
    ),
    idle=fields(
        "resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn summary_type summary_use_proj "
        "summary_activation summary_proj_to_labels summary_first_dropout"
    ),
    only={"add_cross_attention": (False,)},
    settings=_settings,
    places=_places,
    folds_unembedding_bias=True,
)
