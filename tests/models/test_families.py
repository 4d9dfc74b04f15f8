"""Conversion of every architecture and back, and settings that are rejected by name."""

import copy

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.activations import ACT2FN

from rlhf_lab.errors import LoadError
from rlhf_lab.models import conversion
from rlhf_lab.models.conversion import from_hugging_face, to_hugging_face_weights
from rlhf_lab.models.hooked_transformer import ACTIVATION_FUNCTIONS, HookedTransformer
from tests.tiny_families import SIZES, TINY, VARIANTS, random_tokens, tiny_of

EACH = [
    pytest.param(kind, id=name, marks=[pytest.mark.slow] if name in VARIANTS else [])
    for name, kind in ({name: (name, {}) for name in TINY} | VARIANTS).items()
]


@pytest.fixture(params=EACH)
def pair(request, llama_tokenizer):
    architecture, changes = request.param
    hf_model = tiny_of(architecture, **changes)
    return hf_model, from_hugging_face(hf_model, llama_tokenizer, torch.float32)


def untie_and_load(hf_model: PreTrainedModel, model: HookedTransformer) -> PreTrainedModel:
    config = copy.deepcopy(hf_model.config)
    config.tie_word_embeddings = False
    converted = type(hf_model)(config).eval()
    converted.load_state_dict(to_hugging_face_weights(hf_model, dict(model.named_parameters())))
    return converted


def test_trainable_weights_have_gradients_and_convert_back(pair):
    hf_model, model = pair
    back = to_hugging_face_weights(hf_model, dict(model.named_parameters()))
    torch.testing.assert_close(back, dict(hf_model.state_dict()), atol=0, rtol=0)
    tokens, generator = random_tokens(length=model.cfg.n_ctx), torch.Generator().manual_seed(5)
    model(tokens).square().sum().backward()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    keys = ("attn.b_K", "attn._b_K")  # without rotation, the softmax does not depend on b_K
    still = [n for n, p in trainable.items() if not n.endswith(keys) and not p.grad.any()]
    assert still == [] and not any(p.any() for p in model.parameters() if not p.requires_grad)
    n_folded = 24 if "GPT2" in type(hf_model).__name__ else 0  # the unembedding bias
    for parameter in trainable.values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.unembed.b_U.data.zero_()
    converted = untie_and_load(hf_model, model)
    n_theirs = sum(p.numel() for p in converted.parameters())
    assert sum(p.numel() for p in trainable.values()) == n_theirs + n_folded
    with torch.no_grad():
        logits = converted(tokens).logits
        torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=0)
        assert (logits - hf_model(tokens).logits).abs().max() > 0.1


@pytest.mark.parametrize("theirs", conversion.ACTIVATIONS)
def test_activation_functions_match_transformers(theirs):
    x = torch.linspace(-4, 4, 33)
    ours = ACTIVATION_FUNCTIONS[conversion.ACTIVATIONS[theirs]](x)
    torch.testing.assert_close(ours, ACT2FN[theirs](x), atol=1e-6, rtol=1e-5)


def rope(kind: str, **more: object) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more}


LONG = {"short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "partial_rotary_factor": 1.0}
LONG |= {"original_max_position_embeddings": 16}
ALL_SLIDE = {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}
REJECTED = [
    ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
    ("LlamaForCausalLM", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
    ("Qwen2ForCausalLM", rope("linear"), "rope_parameters="),
    ("Qwen2ForCausalLM", ALL_SLIDE, "sliding_window=None"),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 2 + ["linear"]}, "layer_types="),
    ("Phi3ForCausalLM", rope("longrope", **LONG), "rope_parameters="),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention="),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3.0"),
]


def error_message(hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    with pytest.raises(LoadError) as raised:
        from_hugging_face(hf_model, tokenizer, torch.float32)
    return str(raised.value)


@pytest.mark.parametrize(("architecture", "changes", "name"), REJECTED, ids=lambda x: str(x)[:40])
def test_unsupported_setting_raises_with_its_name(architecture, changes, name, llama_tokenizer):
    """Only the configuration is changed because transformers cannot run some of the settings."""
    hf_model = tiny_of(architecture)
    if "rope_parameters" in changes or "use_sliding_window" in changes:
        settings = SIZES | TINY[architecture] | {"head_dim": 4} | changes
        hf_model.config = type(hf_model.config)(**settings)
    else:
        for field, value in changes.items():
            setattr(hf_model.config, field, value)
    message = error_message(hf_model, llama_tokenizer)
    assert name in message and " is not supported. Choose a model with " in message
    assert "\n" not in message and message[-1] == "."


def test_unknown_tensor_raises(llama_tokenizer):
    hf_model = tiny_of("LlamaForCausalLM")
    hf_model.model.layers[1].mlp.extra = torch.nn.Linear(2, 2, bias=False)
    message = error_message(hf_model, llama_tokenizer)
    assert message.startswith("The tensor model.layers.1.mlp.extra.weight is not supported.")
