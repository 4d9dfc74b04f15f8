"""Settings and weights of an architecture that are not converted: each is refused by its name."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlhf_lab.errors import LoadError
from rlhf_lab.models import load_model
from rlhf_lab.models.transformer_lens import FAMILIES
from rlhf_lab.models.transformer_lens.families import table
from tests.tiny_families import LLAMA3, SIZES, TINY, random_tokens, tiny_of


def rope(kind: str, **more: object) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more}


def by_layer(full: dict, sliding: dict) -> dict:
    layers = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {k: {"rope_theta": 1e4} | v for k, v in layers.items()}}


LINEAR = {"rope_type": "linear", "factor": 2.0}
LONG = {"short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "partial_rotary_factor": 1.0}
LONG |= {"original_max_position_embeddings": 16}
GEMMA = "Gemma3ForCausalLM"
BIDIRECTIONAL = "use_bidirectional_attention"
ALL_SLIDE = {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}
REFUSED = [
    ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
    ("LlamaForCausalLM", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
    ("LlamaForCausalLM", {"head_dim": 5}, "5 numbers of each head of 5"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("LlamaForCausalLM", rope("default", partial_rotary_factor=0.5), "rope_parameters="),
    ("MistralForCausalLM", rope("linear"), "rope_parameters="),
    ("Qwen2ForCausalLM", rope("linear"), "rope_parameters="),
    ("Qwen2ForCausalLM", ALL_SLIDE, "sliding_window=None"),
    ("Phi3ForCausalLM", rope("longrope", **LONG), "rope_parameters="),
    ("Gemma2ForCausalLM", {BIDIRECTIONAL: True}, f"{BIDIRECTIONAL}=True"),
    (GEMMA, {BIDIRECTIONAL: True}, f"{BIDIRECTIONAL}=True"),
    (GEMMA, {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3.0"),
    (GEMMA, by_layer({"rope_type": "default"}, LINEAR), "rope_parameters="),
    (GEMMA, by_layer(LLAMA3, {"rope_type": "default"}), "rope_parameters="),
    ("Olmo2ForCausalLM", {"head_dim": 8}, "head_dim=8"),
    ("GPTNeoXForCausalLM", {"head_dim": 8}, "head_dim=8"),
]


def refusal(hf_model, tokenizer: PreTrainedTokenizerFast) -> str:
    with pytest.raises(LoadError) as refused:
        load_model(hf_model, tokenizer)
    sentence = str(refused.value)
    assert "\n" not in sentence and "; choose a model with" in sentence and sentence[-1] == "."
    return sentence


@pytest.mark.parametrize(("architecture", "changes", "named"), REFUSED, ids=lambda x: str(x)[:40])
def test_a_setting_that_is_not_converted_is_refused_by_name(
    architecture, changes, named, llama_tokenizer
):
    """Set on the configuration alone, since some cannot be made or run by transformers either."""
    hf_model = tiny_of(architecture)
    if "rope_parameters" in changes or "layer_types" in changes:
        given = SIZES | TINY[architecture].settings | {"head_dim": 4} | changes
        hf_model.config = type(hf_model.config)(**given)
    else:
        for name, value in changes.items():
            setattr(hf_model.config, name, value)
    assert named in refusal(hf_model, llama_tokenizer)


def test_cross_attention_quantized_weights_and_strange_layers_are_refused(llama_tokenizer):
    gpt2, llama, qwen = (tiny_of(f"{n}") for n in list(TINY)[:5:2])
    gpt2.config.add_cross_attention = True
    assert "add_cross_attention=True" in refusal(gpt2, llama_tokenizer)
    llama.config.quantization_config = {"quant_method": "gptq"}
    assert "quantization_config=" in refusal(llama, llama_tokenizer)
    qwen.config.layer_types = ["full_attention", "full_attention", "linear_attention"]
    assert "layer_types=" in refusal(qwen, llama_tokenizer)


def test_a_field_that_no_table_knows_is_refused_unless_it_is_the_default(llama_tokenizer):
    """As where a later transformers has one more."""
    hf_model = tiny_of("LlamaForCausalLM")

    class Config(type(hf_model.config)):
        def __init__(self, twist: float = 0.0, **settings: object) -> None:
            super().__init__(**settings)
            self.twist = twist

    given = {k: v for k, v in hf_model.config.to_dict().items() if k != "model_type"}
    hf_model.config = Config(**given)
    FAMILIES["LlamaForCausalLM"].check(hf_model.config)
    hf_model.config = Config(twist=0.5, **given)
    with pytest.raises(LoadError, match=r"^twist=0\.5 .*; choose a model with twist=0\.0\.$"):
        FAMILIES["LlamaForCausalLM"].check(hf_model.config)


def test_a_weight_without_a_place_is_refused(llama_tokenizer):
    hf_model = tiny_of("LlamaForCausalLM")
    hf_model.model.layers[1].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(24))
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.up_proj\.bias has no place"):
        load_model(hf_model, llama_tokenizer)


@pytest.mark.parametrize("architecture", TINY)
def test_every_field_of_a_configuration_is_converted_idle_or_refused(architecture):
    """Each in one of the three; those of the base class, such as id2label, apart."""
    family = FAMILIES[architecture]
    declared = set(table.signature(TINY[architecture].config.__init__).parameters)
    declared -= table.OF_EVERY_CONFIG | {"kwargs"}
    three = [family.converted, family.idle | table.WITHOUT_EFFECT, frozenset(family.only)]
    assert declared <= frozenset().union(*three)
    assert sum(map(len, three)) == len(frozenset().union(*three))


@pytest.mark.parametrize("architecture", TINY)
def test_fields_without_effect_have_none(architecture):
    """Other values of them give the same logits, so that leaving them out is right."""
    idle = FAMILIES[architecture].idle | table.WITHOUT_EFFECT
    numbers = [f for f in idle if f.endswith(("drop", "dropout", "initializer_range"))]
    changes = {f: 0.3 for f in numbers} | {"use_cache": False}
    with torch.no_grad():
        one, other = (tiny_of(architecture, **c)(random_tokens()).logits for c in ({}, changes))
    assert torch.equal(one, other)
