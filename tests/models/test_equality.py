"""Our model against transformers and against TransformerLens's HookedTransformer.

All 38 models are compared nightly, one per family in every run.
"""

import copy
import importlib.metadata

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_lab.models.conversion import from_hugging_face
from rlhf_lab.models.hooked_transformer import HookedTransformer
from rlhf_lab.models.kv_cache import KVCache
from rlhf_lab.models.load import load_pretrained_model
from tests.tiny_families import TINY, VARIANTS, WINDOW, tiny_of
from tests.tiny_models import llama_tokenizer
from tests.transformer_lens_model import to_transformer_lens

LOGITS = 6e-5  # largest difference of a logit
GRADIENTS = 1e-12  # relative to the largest gradient of any parameter
ACTIVATIONS = 1e-4
ACTIVATIONS_OF_DEEP = 3e-4  # Gemma 3 of 7 layers
NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
NAMES = ["reel-nano", *TINY, *VARIANTS]
EACH = [pytest.param(n, id=n, marks=[] if n in TINY else NIGHTLY) for n in NAMES]
HAS_TRANSFORMER_LENS_MODEL = int(importlib.metadata.version("transformer_lens").split(".")[0]) < 4
ONLY_THEIRS = ("hook_in", "hook_out")  # hook points of TransformerLens that we lack


def make_pair(name: str) -> tuple[PreTrainedModel, HookedTransformer]:
    if name == "reel-nano":
        hf_model = load_pretrained_model(AutoModelForCausalLM, name, "language model")
    else:
        architecture, changes = (name, {}) if name in TINY else VARIANTS[name]
        hf_model = tiny_of(architecture, **changes)
    return hf_model.eval(), from_hugging_face(hf_model, llama_tokenizer(), torch.float32)


@pytest.fixture(scope="module", params=EACH)
def pair(request) -> tuple[PreTrainedModel, HookedTransformer]:
    return make_pair(request.param)


@pytest.fixture(scope="module")
def theirs(pair) -> torch.nn.Module:
    if not HAS_TRANSFORMER_LENS_MODEL:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    if pair[1].cfg.qk_norm == "all" and pair[1].cfg.d_head == 8:
        pytest.skip("TransformerLens's norm of OLMo 2 has d_model entries")
    return to_transformer_lens(pair[1])


@pytest.fixture(params=[False, True], ids=["whole", "padded"])
def padded(request) -> bool:
    return request.param


def make_tokens(model: HookedTransformer, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Return random tokens and their mask; two of three rows are padded on the left."""
    shape, generator = (3, min(model.cfg.n_ctx, 40)), torch.Generator().manual_seed(1)
    tokens = torch.randint(model.cfg.d_vocab, shape, generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    if padded:
        mask[0, :7] = mask[1, :2] = False
    return tokens, mask


def assert_close(ours: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    difference = (ours - expected).abs().max().item()
    assert difference <= tolerance, f"{what}: {difference:.1e}"


@torch.no_grad()
def test_logits_match_transformers(pair, padded):
    hf_model, model = pair
    tokens, mask = make_tokens(model, padded)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    expected = hf_model(tokens, attention_mask=mask.long(), position_ids=positions).logits
    assert expected.std() > 0.1  # constant logits would be equal by accident
    logits = model(tokens, attention_mask=mask if padded else None)
    assert_close(logits[mask], expected[mask], LOGITS, "logits")


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_cached_decoding_matches_one_forward(pair, chunk, padded):
    _, model = pair
    tokens, mask = make_tokens(model, padded)
    cache, logits = KVCache(model.cfg.n_layers), []
    ends = tuple(range(WINDOW + 4, tokens.shape[1], chunk))
    for new in torch.arange(tokens.shape[1]).tensor_split(ends):
        new_mask = mask[:, new] if padded else None
        logits.append(model(tokens[:, new], attention_mask=new_mask, past_kv_cache=cache))
    expected = model(tokens, attention_mask=mask)
    assert_close(torch.cat(logits, 1)[mask], expected[mask], LOGITS, f"cached {chunk}")


@torch.no_grad()
def test_activations_match_transformer_lens(pair, theirs, padded):
    _, model = pair
    tokens, mask = make_tokens(model, padded)
    expected_logits, expected = theirs.run_with_cache(tokens, attention_mask=mask.long())
    masks = {"attention_mask": mask} if padded else {}
    assert_close(model(tokens, **masks)[mask], expected_logits[mask], LOGITS, "fused logits")
    logits, ours = model.run_with_cache(tokens, names_filter=lambda name: True, **masks)
    assert_close(logits[mask], expected_logits[mask], LOGITS, "logits")
    assert all(name.endswith(ONLY_THEIRS) for name in expected.keys() - ours.keys())
    assert ours.keys() <= expected.keys()
    tolerance = ACTIVATIONS_OF_DEEP if model.cfg.n_layers > 6 else ACTIVATIONS
    for name, activation in () if padded else ours.items():
        reference = expected[name].reshape(activation.shape)  # q/k norms are flat in theirs
        if name.endswith("hook_attn_scores"):
            is_visible = activation.isfinite()
            assert torch.equal(is_visible, reference.isfinite())
            activation, reference = activation[is_visible], reference[is_visible]
        assert_close(activation, reference, tolerance, name)


def test_gradients_match_transformer_lens(pair, theirs):
    gradients = []
    for model in (pair[1], theirs):  # in float64, where rounding cannot hide a difference
        model = copy.deepcopy(model).to(torch.float64, print_details=False)
        tokens, mask = make_tokens(model)
        logits = model(tokens, attention_mask=mask.long())
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    ours, expected = gradients
    trainable = [name for name, p in pair[1].named_parameters() if p.requires_grad]
    largest = max(expected[name].abs().max() for name in trainable)
    for name in trainable:
        assert_close(ours[name] / largest, expected[name] / largest, GRADIENTS, name)
