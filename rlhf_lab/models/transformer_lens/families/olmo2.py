"""OLMo 2: norms after each part alone, and over the queries and keys of all heads together."""

from typing import Any

from transformers import PreTrainedConfig

from rlhf_lab.models.transformer_lens.families.llama import (
    DECODER_FIELDS,
    HEAD_NORMS,
    attention_places,
    decoder_settings,
    mlp_places,
    norm_places,
    outer_places,
)
from rlhf_lab.models.transformer_lens.families.positions import head_size
from rlhf_lab.models.transformer_lens.families.table import Family, Place, fields, refuse

POST_NORMS = {"post_attention_layernorm": "ln1", "post_feedforward_layernorm": "ln2"}


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    d_head = config.hidden_size // config.num_attention_heads
    if head_size(config) != d_head:
        refuse(config, "head_dim", f"head_dim={d_head}")
    return decoder_settings(config)


def _places(config: PreTrainedConfig) -> list[Place]:
    places, biases = outer_places(), "qkvo" if config.attention_bias else ""
    for layer in range(config.num_hidden_layers):
        places += attention_places(config, layer, biases) + mlp_places(layer)
        places += norm_places(layer, POST_NORMS | HEAD_NORMS)
    return places


OLMO2 = Family(
    "Olmo2ForCausalLM",
    converted=fields("hidden_act attention_bias", DECODER_FIELDS),
    settings=_settings,
    places=_places,
)
