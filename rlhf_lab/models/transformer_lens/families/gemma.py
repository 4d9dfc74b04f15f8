"""Gemma 2 and Gemma 3 (text): norms before and after each part, whose gain is 1 + weight."""

from typing import Any

from torch.torch_version import TorchVersion
from transformers import PreTrainedConfig, __version__

from rlhf_lab.errors import LoadError
from rlhf_lab.models.transformer_lens.families.llama import (
    DECODER_FIELDS,
    HEAD_NORMS,
    attention_places,
    decoder_settings,
    mlp_places,
    norm_places,
    outer_places,
)
from rlhf_lab.models.transformer_lens.families.table import Family, Place, fields

NORMS_AROUND = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln1_post",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ln2_post",
}
UNCAPPED = -1.0
CAPS_ATTENTION = "5.21"
"""The oldest transformers whose attention heeds Gemma 2's cap of its scores, unless asked to."""


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    return decoder_settings(config, "hidden_activation") | {
        "use_normalization_before_and_after": True,
        "attn_scale": config.query_pre_attn_scalar**0.5,
        "output_logits_soft_cap": config.final_logit_softcapping or UNCAPPED,
    }


def _gemma2_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Also the cap of attention scores.

    Raises:
        LoadError: there is one, and a transformers that leaves it out.
    """
    if config.attn_logit_softcapping and TorchVersion(__version__) < CAPS_ATTENTION:
        raise LoadError(
            f"attn_logit_softcapping={config.attn_logit_softcapping} of a {config.model_type} "
            f"model is left out by transformers {__version__}; update it to {CAPS_ATTENTION}."
        )
    return _settings(config) | {"attn_scores_soft_cap": config.attn_logit_softcapping or UNCAPPED}


def _gemma3_settings(config: PreTrainedConfig) -> dict[str, Any]:
    return _settings(config) | {"use_qk_norm": True}


def _places(config: PreTrainedConfig, norms: dict[str, str]) -> list[Place]:
    places = outer_places(scale=config.hidden_size**0.5, shift=1.0)
    biases = "qkvo" if config.attention_bias else ""
    for layer in range(config.num_hidden_layers):
        places += attention_places(config, layer, biases) + mlp_places(layer)
        places += norm_places(layer, norms, shift=1.0)
    return places


GEMMA_FIELDS = fields(
    "hidden_activation attention_bias head_dim query_pre_attn_scalar sliding_window layer_types "
    "final_logit_softcapping",
    DECODER_FIELDS,
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    converted=fields("attn_logit_softcapping", GEMMA_FIELDS),
    only={"use_bidirectional_attention": (False,)},
    settings=_gemma2_settings,
    places=lambda config: _places(config, NORMS_AROUND),
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    converted=GEMMA_FIELDS,
    only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": (None,)},
    settings=_gemma3_settings,
    places=lambda config: _places(config, NORMS_AROUND | HEAD_NORMS),
)
