"""Our model against transformers and against TransformerLens's HookedTransformer.

All 39 models are compared nightly (RLHF_LAB_NIGHTLY=1), one per family in every run.
"""

import copy
import importlib.metadata
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_lab.models.conversion import from_hugging_face, to_hugging_face_weights
from rlhf_lab.models.hooked_transformer import HookedTransformer
from rlhf_lab.models.kv_cache import KVCache
from rlhf_lab.models.load import load_pretrained_model
from tests.tiny_families import LLAMA3, LONGROPE, TINY, VARIANTS, WINDOW, YARN, tiny_of
from tests.tiny_models import llama_tokenizer
from tests.transformer_lens_model import to_transformer_lens

LOGITS = 6e-5  # largest difference of a logit
GRADIENTS = 1e-12  # relative to the largest gradient of any parameter
ACTIVATIONS = 1e-4
ACTIVATIONS_OF_DEEP = 3e-4  # Gemma 3 of 7 layers
NIGHTLY = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("RLHF_LAB_NIGHTLY"), reason="RLHF_LAB_NIGHTLY is unset"),
]
NAMES = ["reel-nano", *TINY, *VARIANTS]
EACH = [pytest.param(n, id=n, marks=[] if n in TINY else NIGHTLY) for n in NAMES]
HAS_TRANSFORMER_LENS_MODEL = int(importlib.metadata.version("transformer_lens").split(".")[0]) < 4
ONLY_THEIRS = ("hook_in", "hook_out")  # hook points of TransformerLens that we lack


def gemma3_ropes(full: dict, sliding: dict) -> dict:
    ropes = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {name: {"rope_theta": 100.0} | rope for name, rope in ropes.items()}}


LINEAR = {"rope_type": "linear", "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
NEW = {
    "OLMo 2 with its own head_dim": ("Olmo2ForCausalLM", {"head_dim": 8}),
    "Gemma 3, llama3 and linear": (
        "Gemma3ForCausalLM",
        {"head_dim": 8} | gemma3_ropes(LLAMA3, LINEAR),
    ),
    "Gemma 3, longrope and yarn": (
        "Gemma3ForCausalLM",
        {"head_dim": 4} | gemma3_ropes(LONGROPE, YARN),
    ),
    "Gemma 3, dynamic": (
        "Gemma3ForCausalLM",
        {"head_dim": 8} | gemma3_ropes(DYNAMIC, DYNAMIC),
    ),
}  # rejected before we had our own model


def make_pair(name: str) -> tuple[PreTrainedModel, HookedTransformer]:
    if name == "reel-nano":
        hf_model = load_pretrained_model(AutoModelForCausalLM, name, "language model")
    else:
        architecture, changes = (name, {}) if name in TINY else (VARIANTS | NEW)[name]
        hf_model = tiny_of(architecture, **changes)
    return hf_model.eval(), from_hugging_face(hf_model, llama_tokenizer(), torch.float32)


@pytest.fixture(scope="module", params=EACH)
def pair(request) -> tuple[PreTrainedModel, HookedTransformer]:
    return make_pair(request.param)


@pytest.fixture(scope="module")
def theirs(pair) -> torch.nn.Module:
    if not HAS_TRANSFORMER_LENS_MODEL:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    return to_transformer_lens(pair[1])


def make_tokens(model: HookedTransformer) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = 3, min(model.cfg.n_ctx, 40)
    return torch.randint(model.cfg.d_vocab, shape, generator=generator)


def make_mask(tokens: Tensor) -> Tensor:
    """Two of the rows are padded on the left."""
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :7] = mask[1, :2] = False
    return mask


def assert_close(ours: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    difference = (ours - expected).abs().max().item()
    assert difference <= tolerance, f"{what}: {difference:.1e}"


@torch.no_grad()
def test_logits_match_transformers(pair):
    hf_model, model = pair
    tokens = make_tokens(model)
    expected = hf_model(tokens).logits
    assert expected.std() > 0.1  # constant logits would be equal by accident
    assert_close(model(tokens), expected, LOGITS, "logits")


@torch.no_grad()
@pytest.mark.parametrize("name", NEW)
def test_newly_supported_settings_match_transformers(name):
    hf_model, model = make_pair(name)
    tokens = make_tokens(model)
    assert_close(model(tokens), hf_model(tokens).logits, LOGITS, "logits")


@torch.no_grad()
def test_left_padded_logits_match_transformers(pair):
    hf_model, model = pair
    tokens = make_tokens(model)
    mask = make_mask(tokens)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    expected = hf_model(tokens, attention_mask=mask.long(), position_ids=positions).logits
    ours = model(tokens, attention_mask=mask)
    assert_close(ours[mask], expected[mask], LOGITS, "padded logits")


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_cached_decoding_matches_one_forward(pair, chunk, is_padded):
    _, model = pair
    tokens = make_tokens(model)
    mask = make_mask(tokens) if is_padded else torch.ones_like(tokens, dtype=torch.bool)
    cache, logits = KVCache.empty(model.cfg.n_layers), []
    ends = tuple(range(WINDOW + 4, tokens.shape[1], chunk))
    for new in torch.arange(tokens.shape[1]).tensor_split(ends):
        new_mask = mask[:, new] if is_padded else None
        logits.append(model(tokens[:, new], attention_mask=new_mask, past_kv_cache=cache))
    expected = model(tokens, attention_mask=mask)
    assert_close(torch.cat(logits, 1)[mask], expected[mask], LOGITS, f"cached {chunk}")


def test_conversion_back_is_bitwise_identical(pair):
    hf_model, model = pair
    back = to_hugging_face_weights(hf_model, dict(model.named_parameters()))
    assert back.keys() == hf_model.state_dict().keys()
    for name, weight in hf_model.state_dict().items():
        assert torch.equal(back[name], weight), name


@torch.no_grad()
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_logits_match_transformer_lens(pair, theirs, is_padded):
    _, model = pair
    tokens = make_tokens(model)
    mask = make_mask(tokens) if is_padded else torch.ones_like(tokens, dtype=torch.bool)
    ours = model(tokens, attention_mask=mask if is_padded else None)
    expected = theirs(tokens, attention_mask=mask.long())
    assert_close(ours[mask], expected[mask], LOGITS, "logits of TransformerLens")


@torch.no_grad()
def test_activations_match_transformer_lens(pair, theirs):
    _, model = pair
    tokens = make_tokens(model)
    mask = torch.ones_like(tokens)
    _, expected = theirs.run_with_cache(tokens, attention_mask=mask)
    _, ours = model.run_with_cache(tokens, names_filter=lambda name: True)
    assert all(name.endswith(ONLY_THEIRS) for name in expected.keys() - ours.keys())
    assert ours.keys() <= expected.keys()
    tolerance = ACTIVATIONS_OF_DEEP if model.cfg.n_layers > 6 else ACTIVATIONS
    for name, activation in ours.items():
        reference = expected[name].reshape(activation.shape)  # q/k norms are flat in theirs
        if name.endswith("hook_attn_scores"):
            is_visible = activation.isfinite()
            assert torch.equal(is_visible, reference.isfinite())
            activation, reference = activation[is_visible], reference[is_visible]
        assert_close(activation, reference, tolerance, name)


def test_gradients_match_transformer_lens(pair, theirs):
    """In float64, where rounding cannot hide a difference."""
    gradients = []
    for model in (pair[1], theirs):
        model = copy.deepcopy(model).to(torch.float64, print_details=False)
        tokens = make_tokens(model)
        logits = model(tokens, attention_mask=torch.ones_like(tokens))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    ours, expected = gradients
    trainable = [name for name, p in pair[1].named_parameters() if p.requires_grad]
    largest = max(expected[name].abs().max() for name in trainable)
    for name in trainable:
        assert_close(ours[name] / largest, expected[name] / largest, GRADIENTS, name)
