"""Tests the loader against plain transformers, away from the network, and on broken directories."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
)

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import device, load_model
from rlhf_lab.models.device import pick_device
from rlhf_lab.organism import weights_dir
from rlhf_lab.rewards import SentimentReward

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5, 5, 18], [12, 4, 19, 6, 8, 0, 15, 10]])
FC_WEIGHT = "transformer.h.1.mlp.c_fc.weight"


def plain(place, **options):
    return AutoModelForCausalLM.from_pretrained(str(place), local_files_only=True, **options).eval()


@torch.no_grad()
def assert_same_logits(model, hf_model, tokens=TOKENS, tolerance=1e-4):
    expected = hf_model(tokens).logits
    assert expected.std() > 0.1, "logits that hardly vary would compare equal by accident"
    torch.testing.assert_close(model(tokens), expected, atol=tolerance, rtol=0)


def assert_right_or_refused(directory, hf_model):
    """What the conversion cannot express has to be refused, never to come out wrong."""
    try:
        model = load_model(str(directory))
    except LoadError:
        return
    assert_same_logits(model, hf_model)


def refusal(source, **options):
    with pytest.raises(LoadError) as caught:
        load_model(source, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.fixture
def copy_of(gpt2_dir, tmp_path):
    return Path(shutil.copytree(gpt2_dir, tmp_path / "copied"))


def test_a_local_directory_gives_the_logits_of_plain_transformers(model_dir, no_network):
    assert_same_logits(load_model(str(model_dir)), plain(model_dir))


def test_a_bundled_name_gives_the_logits_of_plain_transformers(no_network):
    tokens = TOKENS[:, :6]
    assert_same_logits(load_model("reel-nano"), plain(weights_dir("reel-nano")), tokens)


def test_a_loaded_model_gives_its_own_logits(model_dir, no_network):
    hf_model = plain(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    model = load_model(hf_model, tokenizer)
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert_same_logits(model, hf_model)


def test_a_loaded_model_is_neither_changed_nor_shared(gpt2_dir, gpt2_tokenizer):
    hf_model = plain(gpt2_dir)
    before = {name: value.clone() for name, value in hf_model.state_dict().items()}
    config = hf_model.config.to_dict()
    model = load_model(hf_model, AutoTokenizer.from_pretrained(str(gpt2_dir)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert hf_model.config.to_dict() == config
    for name, value in hf_model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("name", ["llama-2-tuned", "gemma-like"])
@pytest.mark.parametrize("place", ["directory", "parent"])
def test_a_gpt2_in_a_path_that_names_another_architecture_loads_right(
    gpt2_dir, tmp_path, name, place, no_network
):
    target = tmp_path / name if place == "directory" else tmp_path / name / "model"
    shutil.copytree(gpt2_dir, target)
    assert_same_logits(load_model(str(target)), plain(gpt2_dir))


def test_a_llama_in_a_path_named_gpt2_loads_right(llama_dir, tmp_path, no_network):
    target = shutil.copytree(llama_dir, tmp_path / "gpt2")
    assert_same_logits(load_model(str(target)), plain(llama_dir))


def test_a_gpt2_configuration_without_n_ctx_loads(
    tmp_path, make_tiny_gpt2, gpt2_tokenizer, save_model
):
    """Transformers writes n_positions only, unless n_ctx was given when the model was made."""
    hf_model = make_tiny_gpt2()
    del hf_model.config.n_ctx
    directory = save_model(hf_model, gpt2_tokenizer, tmp_path / "plain")
    assert '"n_ctx"' not in (directory / "config.json").read_text()
    model = load_model(str(directory))
    assert model.cfg.n_ctx == hf_model.config.n_positions
    assert_same_logits(model, hf_model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"n_inner": 40},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"activation_function": "relu"},
        {"activation_function": "tanh"},
        {"layer_norm_epsilon": 0.1},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_a_gpt2_variant_gives_the_right_logits_or_is_refused(
    tmp_path, make_tiny_gpt2, gpt2_tokenizer, save_model, changes
):
    hf_model = make_tiny_gpt2(**changes)
    directory = save_model(hf_model, gpt2_tokenizer, tmp_path / "variant")
    assert_right_or_refused(directory, hf_model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 8},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=str,
)
def test_a_llama_variant_gives_the_right_logits_or_is_refused(
    tmp_path, make_tiny_llama, llama_tokenizer, save_model, changes
):
    hf_model = make_tiny_llama(**changes)
    directory = save_model(hf_model, llama_tokenizer, tmp_path / "variant")
    assert_right_or_refused(directory, hf_model)


def test_a_tokenizer_that_was_made_in_memory_is_accepted(make_tiny_gpt2, gpt2_tokenizer):
    """Such a tokenizer has no name_or_path until it was saved and read again."""
    hf_model = make_tiny_gpt2()
    assert "name_or_path" not in gpt2_tokenizer.init_kwargs
    assert_same_logits(load_model(hf_model, gpt2_tokenizer), hf_model)


def test_a_home_relative_path_is_expanded(gpt2_dir, monkeypatch, no_network):
    monkeypatch.setenv("HOME", str(gpt2_dir.parent))
    assert_same_logits(load_model(f"~/{gpt2_dir.name}"), plain(gpt2_dir))


def test_nothing_is_folded_or_centered_in_a_gpt2(gpt2_dir):
    model, hf = load_model(str(gpt2_dir)), plain(gpt2_dir)
    torch.testing.assert_close(model.W_U, hf.lm_head.weight.T, atol=0, rtol=0)
    torch.testing.assert_close(model.W_E, hf.transformer.wte.weight, atol=0, rtol=0)
    torch.testing.assert_close(model.W_pos, hf.transformer.wpe.weight, atol=0, rtol=0)
    assert torch.count_nonzero(model.b_U) == 0
    for ours, theirs in zip(model.blocks, hf.transformer.h, strict=True):
        torch.testing.assert_close(ours.mlp.W_in, theirs.mlp.c_fc.weight, atol=0, rtol=0)
        torch.testing.assert_close(ours.mlp.W_out, theirs.mlp.c_proj.weight, atol=0, rtol=0)
        torch.testing.assert_close(ours.mlp.b_out, theirs.mlp.c_proj.bias, atol=0, rtol=0)
        values = theirs.attn.c_attn.bias[32:].reshape(2, 8)
        torch.testing.assert_close(ours.attn.b_V, values, atol=0, rtol=0)


def test_nothing_is_folded_or_centered_in_a_llama(llama_dir):
    model, hf = load_model(str(llama_dir)), plain(llama_dir)
    torch.testing.assert_close(model.W_U, hf.lm_head.weight.T, atol=0, rtol=0)
    torch.testing.assert_close(model.W_E, hf.model.embed_tokens.weight, atol=0, rtol=0)
    for ours, theirs in zip(model.blocks, hf.model.layers, strict=True):
        torch.testing.assert_close(ours.mlp.W_out, theirs.mlp.down_proj.weight.T, atol=0, rtol=0)


def test_the_norms_of_a_gpt2_keep_a_trainable_gain_and_bias(gpt2_dir):
    model, hf = load_model(str(gpt2_dir)), plain(gpt2_dir).transformer
    pairs = [(model.ln_final, hf.ln_f)]
    for ours, theirs in zip(model.blocks, hf.h, strict=True):
        pairs += [(ours.ln1, theirs.ln_1), (ours.ln2, theirs.ln_2)]
    for norm, expected in pairs:
        torch.testing.assert_close(norm.w, expected.weight, atol=0, rtol=0)
        torch.testing.assert_close(norm.b, expected.bias, atol=0, rtol=0)
        assert norm.w.requires_grad and norm.b.requires_grad


def test_the_norms_of_a_llama_keep_a_trainable_gain(llama_dir):
    model, hf = load_model(str(llama_dir)), plain(llama_dir).model
    pairs = [(model.ln_final, hf.norm)]
    for ours, theirs in zip(model.blocks, hf.layers, strict=True):
        pairs += [(ours.ln1, theirs.input_layernorm), (ours.ln2, theirs.post_attention_layernorm)]
    for norm, expected in pairs:
        torch.testing.assert_close(norm.w, expected.weight, atol=0, rtol=0)
        assert norm.w.requires_grad


def test_ln_final_hook_normalized_stands_before_the_gain(model_dir):
    """Root mean square 1, whatever the gain: the value head means the same in both models."""
    _, cache = load_model(str(model_dir)).run_with_cache(TOKENS)
    rms = cache["ln_final.hook_normalized"].pow(2).mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), atol=1e-3, rtol=0)


def test_half_precision_files_are_read_as_float32_by_default(
    tmp_path, make_tiny_gpt2, gpt2_tokenizer, save_model
):
    directory = save_model(make_tiny_gpt2().half(), gpt2_tokenizer, tmp_path / "half")
    stored = load_file(directory / "model.safetensors")
    assert all(value.dtype == torch.float16 for value in stored.values())
    model = load_model(str(directory))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.cfg.dtype == torch.float32


def test_the_model_runs_in_the_dtype_that_was_asked_for(gpt2_dir):
    model = load_model(str(gpt2_dir), dtype=torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    exact = plain(gpt2_dir, dtype=torch.float64)
    assert_same_logits(model, exact, tolerance=1e-10)


def test_the_device_reaches_the_configuration(gpt2_dir):
    model = load_model(str(gpt2_dir), device="meta")
    assert str(model.cfg.device) == "meta"
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_the_configuration_remembers_where_the_model_came_from(gpt2_dir):
    assert load_model(str(gpt2_dir)).cfg.model_name == str(gpt2_dir)


def test_a_missing_directory_is_named(tmp_path):
    missing = str(tmp_path / "nowhere")
    sentence = refusal(missing)
    assert missing in sentence and "no model directory" in sentence and "reel-nano" in sentence


def test_a_directory_without_a_configuration_is_named(tmp_path):
    sentence = refusal(str(tmp_path))
    assert str(tmp_path) in sentence and "config.json" in sentence


def test_a_configuration_that_is_not_json_is_refused(copy_of):
    (copy_of / "config.json").write_text("{")
    sentence = refusal(str(copy_of))
    assert str(copy_of) in sentence and "config" in sentence


def test_a_directory_without_weights_is_refused(copy_of):
    (copy_of / "model.safetensors").unlink()
    sentence = refusal(str(copy_of))
    assert str(copy_of) in sentence and "model.safetensors" in sentence


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_corrupt_weights_file_is_refused(copy_of, damage):
    weights = copy_of / "model.safetensors"
    content = {"truncated": weights.read_bytes()[:2000], "garbage": b"xy" * 500, "empty": b""}
    weights.write_bytes(content[damage])
    assert str(copy_of) in refusal(str(copy_of))


def test_a_weights_file_that_lacks_a_matrix_is_refused(copy_of):
    """Transformers would fill the gap with random numbers and go on."""
    weights = load_file(copy_of / "model.safetensors")
    del weights[FC_WEIGHT]
    save_file(weights, copy_of / "model.safetensors", metadata={"format": "pt"})
    assert str(copy_of) in refusal(str(copy_of))


def test_a_matrix_of_the_wrong_shape_is_refused(copy_of):
    weights = load_file(copy_of / "model.safetensors") | {FC_WEIGHT: torch.zeros(3, 4)}
    save_file(weights, copy_of / "model.safetensors", metadata={"format": "pt"})
    assert str(copy_of) in refusal(str(copy_of))


def test_a_directory_without_a_tokenizer_is_refused(copy_of):
    """Transformers would make up a tokenizer that turns every text into no tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy_of / name).unlink()
    sentence = refusal(str(copy_of))
    assert str(copy_of) in sentence and "tokenizer" in sentence


def test_a_corrupt_tokenizer_is_refused(copy_of):
    (copy_of / "tokenizer.json").write_text("{")
    sentence = refusal(str(copy_of))
    assert str(copy_of) in sentence and "tokenizer" in sentence


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "BertLMHeadModel"])
def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    tmp_path, gpt2_tokenizer, save_model, architecture
):
    shape = {
        "vocab_size": 21,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    makers = {
        "BloomForCausalLM": lambda: BloomForCausalLM(BloomConfig(**shape)),
        "BertLMHeadModel": lambda: BertLMHeadModel(BertConfig(**shape, is_decoder=True)),
    }
    directory = save_model(makers[architecture](), gpt2_tokenizer, tmp_path / "other")
    sentence = refusal(str(directory))
    assert architecture in sentence
    assert "GPT2LMHeadModel" in sentence and "LlamaForCausalLM" in sentence


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
def test_an_unknown_hub_name_says_everywhere_that_was_looked(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    sentence = refusal(name)
    assert name in sentence and "reel-nano" in sentence and "hub" in sentence


def test_a_loaded_model_without_its_tokenizer_is_refused(make_tiny_gpt2):
    assert "tokenizer" in refusal(make_tiny_gpt2())


def test_an_unknown_device_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match="device='abacus'"):
        pick_device("abacus")


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda:1'"):
        pick_device("cuda:1")


def test_a_device_index_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="device='cuda:1'"):
        pick_device("cuda:1")


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_takes_the_fastest_device_there_is(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(device, "MPS_TORCH", "0")
    assert pick_device("auto") == torch.device(expected)


def test_smollm2_gives_the_logits_of_plain_transformers(real_models, no_network):
    directory = real_models / "smollm2"
    hf_model = plain(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    tokens = tokenizer("This movie was really something else.", return_tensors="pt").input_ids
    assert_same_logits(load_model(str(directory)), hf_model, tokens, tolerance=1e-3)


def change_settings(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import GPT2Config, GPT2LMHeadModel
class Config(GPT2Config):
    model_type = "unheard-of"
class Model(GPT2LMHeadModel):
    config_class = Config
"""


@pytest.mark.parametrize("kind", ["unheard-of", "gpt2"])
def test_code_that_comes_with_a_model_is_not_run_and_not_asked_about(
    copy_of, monkeypatch, tmp_path, kind
):
    """Asked at a terminal, transformers would run it after a y, before anything is refused."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    marks = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(marks))
    (copy_of / "evil.py").write_text(CODE)
    loaders = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    auto_map = {"AutoConfig": "evil.Config"} | dict.fromkeys(loaders, "evil.Model")
    change_settings(copy_of, model_type=kind, auto_map=auto_map)
    if kind == "unheard-of":
        for load in (load_model, SentimentReward):
            with pytest.raises(LoadError, match="code of its own, which is not run"):
                load(str(copy_of))
    else:
        load_model(str(copy_of))
    assert not asked
    assert not list(tmp_path.rglob("ran"))


def test_pickled_weights_are_refused_unread(copy_of):
    weights = load_file(copy_of / "model.safetensors")
    torch.save(weights, copy_of / "pytorch_model.bin")
    load_model(str(copy_of))  # safetensors lie beside it
    (copy_of / "model.safetensors").unlink()
    sentence = refusal(str(copy_of))
    assert "pytorch_model.bin" in sentence and "safetensors" in sentence
    (copy_of / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "pytorch_model.bin" in refusal(str(copy_of))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": -1},
        {"n_head": 0},
        {"n_embd": "x"},
        {"n_embd": 0},
        {"n_positions": -4},
        {"vocab_size": None},
        {"dtype": "junk"},
        {"model_type": ["gpt2"]},
        {"model_type": None},
        {"layer_norm_epsilon": "small"},
        {"activation_function": "no such function"},
    ],
    ids=str,
)
def test_a_configuration_with_a_bad_value_is_refused_in_a_sentence(copy_of, changes):
    change_settings(copy_of, **changes)
    assert str(copy_of) in refusal(str(copy_of))


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"a": ' * 5000 + "1" + "}" * 5000])
def test_a_configuration_that_is_no_object_is_refused_in_a_sentence(copy_of, content):
    (copy_of / "config.json").write_text(content)
    assert str(copy_of) in refusal(str(copy_of))


def test_a_token_without_an_embedding_is_refused_with_both_numbers(copy_of):
    tokenizer = AutoTokenizer.from_pretrained(str(copy_of), local_files_only=True)
    rows = load_file(copy_of / "model.safetensors")["transformer.wte.weight"].shape[0]
    tokenizer.add_tokens([f"new{i}" for i in range(rows)])
    tokenizer.save_pretrained(copy_of)
    sentence = refusal(str(copy_of))
    assert f"{rows} embeddings" in sentence and f"the number {len(tokenizer) - 1}" in sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(copy_of, value):
    """Their logits would be alike, as far as a comparison with nan tells, and sampling empty."""
    weights = load_file(copy_of / "model.safetensors")
    weights[FC_WEIGHT][0, 0] = value
    save_file(weights, copy_of / "model.safetensors", metadata={"format": "pt"})
    assert "h.1.mlp.c_fc.weight" in (said := refusal(str(copy_of))) and "nan or inf" in said
