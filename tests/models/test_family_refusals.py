"""Settings and tensors that are not converted: each is rejected by name."""

from inspect import signature

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_lab.errors import LoadError
from rlhf_lab.models import families
from rlhf_lab.models.conversion import (
    IN_EVERY_CONFIG,
    IN_EVERY_FAMILY,
    WITHOUT_EFFECT,
    from_hugging_face,
)
from rlhf_lab.models.families import FAMILIES
from tests.tiny_families import SIZES, TINY, random_tokens, tiny_of


def rope(kind: str, **more: object) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more}


LONG = {"short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "partial_rotary_factor": 1.0}
LONG |= {"original_max_position_embeddings": 16}
BIDIRECTIONAL = "use_bidirectional_attention"
ALL_SLIDE = {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}
REJECTED = [
    ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
    ("LlamaForCausalLM", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
    ("LlamaForCausalLM", {"head_dim": 5}, "an even rotary dimension instead of 5"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
    ("LlamaForCausalLM", rope("default", partial_rotary_factor=0.5), "rope_parameters="),
    ("MistralForCausalLM", rope("linear"), "rope_parameters="),
    ("Qwen2ForCausalLM", rope("linear"), "rope_parameters="),
    ("Qwen2ForCausalLM", ALL_SLIDE, "sliding_window=None"),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 2 + ["linear"]}, "layer_types="),
    ("Phi3ForCausalLM", rope("longrope", **LONG), "rope_parameters="),
    ("Gemma2ForCausalLM", {BIDIRECTIONAL: True}, f"{BIDIRECTIONAL}=True"),
    ("Gemma3ForCausalLM", {BIDIRECTIONAL: True}, f"{BIDIRECTIONAL}=True"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3.0"),
    ("GPTNeoXForCausalLM", {"head_dim": 8}, "head_dim=8"),
]
ONLY_DEFAULTS = {
    "GPT2LMHeadModel": {"add_cross_attention"},
    "LlamaForCausalLM": {"mlp_bias"},
    "Gemma2ForCausalLM": {BIDIRECTIONAL},
    "Gemma3ForCausalLM": {BIDIRECTIONAL, "attn_logit_softcapping"},
}  # fields of which no other value is supported


def error_message(hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    with pytest.raises(LoadError) as raised:
        from_hugging_face(hf_model, tokenizer, torch.float32)
    return str(raised.value)


@pytest.mark.parametrize(("architecture", "changes", "name"), REJECTED, ids=lambda x: str(x)[:40])
def test_unsupported_setting_raises_with_its_name(architecture, changes, name, llama_tokenizer):
    """Only the configuration is changed because transformers cannot run some of the settings."""
    hf_model = tiny_of(architecture)
    if "rope_parameters" in changes or "use_sliding_window" in changes:
        settings = SIZES | TINY[architecture].settings | {"head_dim": 4} | changes
        hf_model.config = type(hf_model.config)(**settings)
    else:
        for field, value in changes.items():
            setattr(hf_model.config, field, value)
    message = error_message(hf_model, llama_tokenizer)
    assert name in message and " is not supported. Choose a model with " in message
    assert "\n" not in message and message[-1] == "."


def test_soft_cap_raises_with_a_transformers_that_ignores_it(llama_tokenizer, monkeypatch):
    hf_model = tiny_of("Gemma2ForCausalLM")
    monkeypatch.setattr(families, "__version__", "5.20.1")
    message = "attn_logit_softcapping=2.0 requires transformers>=5.21."
    assert error_message(hf_model, llama_tokenizer) == message
    hf_model.config.attn_logit_softcapping = None
    from_hugging_face(hf_model, llama_tokenizer, torch.float32)


def test_unknown_field_raises_unless_it_has_its_default():
    """As if a later transformers had one more field."""
    config = tiny_of("LlamaForCausalLM").config

    class Config(type(config)):
        def __init__(self, twist: float = 0.0, **settings: object) -> None:
            super().__init__(**settings)
            self.twist = twist

    settings = {k: v for k, v in config.to_dict().items() if k != "model_type"}
    FAMILIES["LlamaForCausalLM"].validate(Config(**settings))
    with pytest.raises(LoadError, match=r"^twist=0\.5 .* Choose a model with twist=0\.0\.$"):
        FAMILIES["LlamaForCausalLM"].validate(Config(twist=0.5, **settings))


def test_unknown_tensor_raises(llama_tokenizer):
    hf_model = tiny_of("LlamaForCausalLM")
    hf_model.model.layers[1].mlp.extra = torch.nn.Linear(2, 2, bias=False)
    message = error_message(hf_model, llama_tokenizer)
    assert message.startswith("The tensor model.layers.1.mlp.extra.weight is not supported.")


@pytest.mark.parametrize("architecture", TINY)
def test_fields_are_converted_without_effect_or_only_default(architecture):
    known = FAMILIES[architecture].fields.keys() | IN_EVERY_FAMILY
    assert known.isdisjoint(WITHOUT_EFFECT)
    declared = signature(TINY[architecture].config.__init__).parameters.keys()
    others = declared - known - WITHOUT_EFFECT - IN_EVERY_CONFIG - {"kwargs"}
    assert others == ONLY_DEFAULTS.get(architecture, set())


@pytest.mark.parametrize("architecture", TINY)
def test_fields_without_effect_do_not_change_logits(architecture):
    names = [f for f in WITHOUT_EFFECT if f.endswith(("drop", "dropout", "initializer_range"))]
    declared = signature(TINY[architecture].config.__init__).parameters
    changes = {f: 0.3 for f in names if f in declared} | {"use_cache": False}
    with torch.no_grad():
        one, other = (tiny_of(architecture, **c)(random_tokens()).logits for c in ({}, changes))
    assert torch.equal(one, other)
