"""Every architecture that is loaded, against plain transformers, beyond its windows and back."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import Forward, TransformerWithValueHead, final_residuals, load_model
from rlhf_lab.models.critic import init_cache
from rlhf_lab.models.export import to_hugging_face
from rlhf_lab.models.fast import packed_residuals
from rlhf_lab.models.transformer_lens import FAMILIES, from_hugging_face, make_model
from rlhf_lab.models.transformer_lens.families import table
from tests.tiny_families import CONTEXT, TINY, VARIANTS, WINDOW, random_tokens, tiny_of

ALL = {name: (name, {}) for name in TINY} | VARIANTS
WITH_WINDOWS = [
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
]
PACKED = [
    "Llama tied, as many keys as queries",
    "LlamaForCausalLM",
    "Llama, yarn, all set",
    "Mistral without a window",
    "Mistral, a window of all",
    "Qwen 2 without windows",
    "Phi-3 without a window, all turned",
    "Phi-3, long",
    "NeoX in series",
]


EACH = [
    pytest.param(kind, id=name, marks=[pytest.mark.slow] if name in VARIANTS else [])
    for name, kind in ALL.items()
]


@pytest.fixture(params=EACH)
def pair(request, llama_tokenizer):
    """A tiny model of each kind as transformers has it, and hooked."""
    architecture, changes = request.param
    hf_model = tiny_of(architecture, **changes)
    return hf_model, load_model(hf_model, llama_tokenizer)


@pytest.fixture(params=TINY)
def directory(request, tmp_path, llama_tokenizer, save_model) -> Path:
    """A tiny model of each architecture on disk."""
    return save_model(tiny_of(request.param), llama_tokenizer, tmp_path / "tiny")


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.1, "logits that hardly vary would compare equal by accident"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_each_architecture_has_a_tiny_model():
    assert TINY.keys() == FAMILIES.keys()


@torch.no_grad()
def test_a_text_longer_than_the_windows_has_the_logits_of_transformers(pair):
    hf_model, model = pair
    tokens = random_tokens(length=model.cfg.n_ctx)
    assert_close(model(tokens), hf_model(tokens).logits)


@torch.no_grad()
def test_left_padded_rows_and_cached_decoding_are_those_of_transformers(pair):
    """Whole, and token by token with a cache that reaches back beyond the windows."""
    hf_model, model = pair
    tokens = random_tokens(length=model.cfg.n_ctx)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :7] = mask[1, :2] = False
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    expected = hf_model(tokens, attention_mask=mask.long(), position_ids=positions).logits
    policy = TransformerWithValueHead(model)
    assert_close(policy(tokens, mask)[0][mask], expected[mask])
    cache = init_cache(policy, len(tokens))
    parts = [policy(tokens[:, :9], mask[:, :9], cache)[0]]
    for i in range(9, tokens.shape[1]):
        parts.append(policy(tokens[:, i : i + 1], mask[:, i : i + 1], cache)[0])
    assert_close(torch.cat(parts, 1)[mask], expected[mask])


@torch.no_grad()
@pytest.mark.parametrize("architecture", WITH_WINDOWS)
def test_the_windows_matter_in_these_texts(architecture, llama_tokenizer):
    """So that a window that is lost, or one token longer or shorter, would be seen."""
    hf_model = tiny_of(architecture)
    model = load_model(hf_model, llama_tokenizer)
    tokens, expected = random_tokens(), None
    for size in (CONTEXT, WINDOW - 1, WINDOW, WINDOW + 1):
        model.cfg.window_size = size
        expected = hf_model(tokens).logits if expected is None else expected
        assert ((model(tokens) - expected).abs().max() > 0.01) == (size != WINDOW), size


def test_what_was_loaded_goes_back_bit_for_bit(pair):
    hf_model, model = pair
    exported = to_hugging_face(model, hf_model)
    back = exported.state_dict()
    for name, weight in hf_model.state_dict().items():
        assert torch.equal(back[name], weight), name
    assert exported.config.tie_word_embeddings is False
    embedding, unembedding = exported.get_input_embeddings(), exported.get_output_embeddings()
    assert embedding.weight is not unembedding.weight


@torch.no_grad()
def test_what_was_changed_goes_back_too(pair):
    """Each parameter that can be trained moves; embedding and unembedding go their own ways."""
    hf_model, model = pair
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.unembed.b_U.zero_()
    exported = to_hugging_face(model, hf_model)
    tokens = random_tokens(length=model.cfg.n_ctx)
    assert_close(exported(tokens).logits, model(tokens))
    assert (exported(tokens).logits - hf_model(tokens).logits).abs().max() > 0.1


def test_every_parameter_that_can_be_trained_moves_the_logits(pair):
    """And no bias that the architecture does not have can be trained."""
    hf_model, model = pair
    logits = model(random_tokens(length=model.cfg.n_ctx))
    logits.square().sum().backward()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    keys = ("attn.b_K", "attn._b_K")  # of no effect without rotation: each key has the same
    still = [n for n, p in trainable.items() if not n.endswith(keys) and not p.grad.any()]
    if model.cfg.use_local_attn and model.cfg.window_size == 1:
        still = [n for n in still if "W_Q" not in n and "W_K" not in n]
    assert still == []
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert all(not p.any() for n, p in model.named_parameters() if n in frozen)
    n_weights = sum(p.numel() for p in trainable.values())
    untied = to_hugging_face(model, hf_model)
    own = 24 if "GPT2" in type(hf_model).__name__ else 0  # the unembedding's bias is folded
    assert n_weights - own == sum(p.numel() for p in untied.parameters())


@pytest.mark.parametrize("name", PACKED)
def test_the_packed_form_of_a_plain_one_is_the_modules(name, llama_tokenizer):
    """In residuals and in gradients, for every architecture of the allow-list."""
    architecture, changes = ALL[name]
    model = load_model(tiny_of(architecture, **changes), llama_tokenizer)
    tokens = random_tokens(length=model.cfg.n_ctx)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :7] = False
    assert Forward("packed").packs(model)
    weights = torch.randn(*tokens.shape, 16, generator=torch.Generator().manual_seed(2))
    used = [p for n, p in model.named_parameters() if not n.startswith(("unembed", "ln_final"))]
    used, found = [p for p in used if p.requires_grad], []
    for residuals in (packed_residuals(model, tokens, mask), final_residuals(model, tokens, mask)):
        gradients = torch.autograd.grad((residuals * weights)[mask].sum(), used)
        found.append([residuals[mask], *gradients])
    for packed, expected in zip(*found, strict=True):
        assert (packed - expected).norm() <= 1e-4 * max(1.0, expected.norm())


REASONS = {
    "GPTNeoXForCausalLM": "parallel_attn_mlp=True",
    "MistralForCausalLM": "use_local_attn=True",
    "Mistral, a window of 1": "use_local_attn=True",
    "Qwen2ForCausalLM": "use_local_attn=True",
    "Qwen3ForCausalLM": "use_qk_norm=True",
    "Qwen 3 without windows, tied": "use_qk_norm=True",
    "Phi3ForCausalLM": "use_local_attn=True",
    "Gemma2ForCausalLM": "use_local_attn=True",
    "Gemma 2 without caps": "use_local_attn=True",
    "Gemma3ForCausalLM": "use_qk_norm=True",
    "Olmo2ForCausalLM": "original_architecture='Olmo2ForCausalLM'",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_modules_run_where_the_packed_form_does_not_know_a_setting(name, llama_tokenizer):
    architecture, changes = ALL[name]
    model = load_model(tiny_of(architecture, **changes), llama_tokenizer)
    with pytest.warns(UserWarning, match=f"does not know cfg.{REASONS[name]}"):
        assert not Forward().packs(model)
    with pytest.raises(ConfigError, match="forward='packed' cannot run"):
        Forward("packed").packs(model)


def test_a_directory_is_read_as_transformers_reads_it(directory, no_network):
    model = load_model(str(directory))
    expected = AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True)
    with torch.no_grad():
        assert_close(model(random_tokens()), expected.eval()(random_tokens()).logits)
    assert model.cfg.model_name == str(directory)
    assert model.cfg.n_ctx == CONTEXT


@pytest.mark.parametrize("architecture", TINY)
def test_weights_in_half_precision_are_read(architecture, llama_tokenizer):
    """Norms and products are rounded at other places; a wrong table differs by most of the norm."""
    hf_model = tiny_of(architecture).bfloat16()
    model = load_model(hf_model, llama_tokenizer, dtype=torch.bfloat16)
    tokens = random_tokens()
    with torch.no_grad():
        found, expected = model(tokens), hf_model(tokens).logits
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() / expected.norm() < 0.1
    load_model(hf_model, llama_tokenizer)  # in single precision


def test_names_of_activation_functions_mean_the_same_in_both():
    x = torch.linspace(-4, 4, 33)
    for theirs, ours in table.ACTIVATIONS_OF_TRANSFORMERS.items():
        sizes = {"n_layers": 1, "d_model": 4, "n_ctx": 4, "d_head": 2, "d_vocab": 5}
        act_fn = make_model(**sizes, act_fn=ours).blocks[0].mlp.act_fn
        torch.testing.assert_close(act_fn(x), ACT2FN[theirs](x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("architecture", WITH_WINDOWS)
def test_the_check_of_the_logits_sees_a_window_that_a_conversion_lost(
    architecture, llama_tokenizer, monkeypatch
):
    """It reads more than the eight tokens that once were enough for it."""

    def lose_windows(hf_model, tokenizer, dtype):
        model = from_hugging_face(hf_model, tokenizer, dtype)
        for block in model.blocks:
            block.attn.attn_type = "global"
        return model

    monkeypatch.setattr("rlhf_lab.models.load.from_hugging_face", lose_windows)
    with pytest.raises(LoadError, match="its logits come out different by"):
        load_model(tiny_of(architecture, sliding_window=30), llama_tokenizer)


def test_a_copy_keeps_windows_bases_and_caps(llama_tokenizer):
    """The reference and the critic are copies; their rotary tables grow with the text."""
    model = load_model(tiny_of("Gemma3ForCausalLM"), llama_tokenizer)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copy.deepcopy(model)(random_tokens()), model(random_tokens()))
