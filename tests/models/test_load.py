"""Tests of the loader against plain transformers, without the network, and on damaged files."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM

from rlhf_lab.errors import LoadError
from rlhf_lab.models import load as load_module
from rlhf_lab.models import load_model
from rlhf_lab.organism import weights_dir
from rlhf_lab.rewards import SentimentReward

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5, 5, 18], [12, 4, 19, 6, 8, 0, 15, 10]])
FC_WEIGHT = "transformer.h.1.mlp.c_fc.weight"


def load_plain(place, **options):
    return AutoModelForCausalLM.from_pretrained(str(place), local_files_only=True, **options).eval()


@torch.no_grad()
def assert_same_logits(model, hf_model, tokens=TOKENS, tolerance=1e-4):
    expected = hf_model(tokens).logits
    assert expected.std() > 0.1, "constant logits would be equal by accident"
    torch.testing.assert_close(model(tokens), expected, atol=tolerance, rtol=0)


def error_message(source, **options):
    with pytest.raises(LoadError) as error:
        load_model(source, **options)
    message = str(error.value)
    assert "\n" not in message and (not isinstance(source, str) or source in message)
    return message


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def copied(gpt2_dir, tmp_path):
    return Path(shutil.copytree(gpt2_dir, tmp_path / "copied"))


def test_directory_matches_transformers(model_dir, monkeypatch, no_network):
    monkeypatch.setenv("HOME", str(model_dir.parent))
    for name in (str(model_dir), f"~/{model_dir.name}"):
        assert_same_logits(load_model(name), load_plain(model_dir))


def test_bundled_name_matches_transformers(no_network):
    model, place = load_model("reel-nano"), weights_dir("reel-nano")
    assert_same_logits(model, load_plain(place), TOKENS[:, :6])


def test_loaded_model_is_converted_and_not_changed(model_dir, no_network):
    hf_model = load_plain(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    before = {name: value.clone() for name, value in hf_model.state_dict().items()}
    config = hf_model.config.to_dict()
    assert "requires its tokenizer" in error_message(hf_model)
    model = load_model(hf_model, tokenizer)
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert_same_logits(model, hf_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert hf_model.config.to_dict() == config
    for name, value in hf_model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_weights_are_neither_folded_nor_centered(model_dir):
    model, hf = load_model(str(model_dir)), load_plain(model_dir)
    assert torch.equal(model.W_U, hf.lm_head.weight.T)
    assert torch.equal(model.W_E, hf.get_input_embeddings().weight)
    hf_norms = [part for part in hf.modules() if type(part).__name__.endswith("Norm")]
    norms = [norm for block in model.blocks for norm in (block.ln1, block.ln2)]
    for norm, expected in zip([*norms, model.ln_final], hf_norms, strict=True):
        assert torch.equal(norm.w, expected.weight) and norm.w.requires_grad
        if norm.is_centered:
            assert torch.equal(norm.b, expected.bias) and norm.b.requires_grad


def test_hook_normalized_is_before_the_gain(model_dir):
    """The root mean square is 1 for every gain, so the value head is the same in both models."""
    _, cache = load_model(str(model_dir)).run_with_cache(TOKENS)
    rms = cache["ln_final.hook_normalized"].pow(2).mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), atol=1e-3, rtol=0)


def test_dtype_device_and_name_are_set(tmp_path, make_tiny_gpt2, gpt2_tokenizer, save_model):
    """Float32 by default, also if the files are in half precision."""
    directory = str(save_model(make_tiny_gpt2().half(), gpt2_tokenizer, tmp_path / "half"))
    for options in ({}, {"dtype": torch.float64}, {"device": "meta"}):
        model = load_model(directory, **options)
        dtype, device = options.get("dtype", torch.float32), options.get("device", "cpu")
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(dtype, device)}
        assert (model.cfg.dtype, str(model.cfg.device)) == (dtype, device)
        assert model.cfg.model_name == directory


def test_conversion_with_other_logits_raises(gpt2_dir, monkeypatch):
    convert = load_module.from_hugging_face

    def lose_bias(*arguments):
        model = convert(*arguments)
        model.blocks[0].mlp.b_out.data.zero_()
        return model

    monkeypatch.setattr(load_module, "from_hugging_face", lose_bias)
    assert "its logits differ" in error_message(str(gpt2_dir))


def test_missing_model_directory_raises(tmp_path):
    for place in (tmp_path / "missing", tmp_path):
        message = error_message(str(place))
        assert "no model directory" in message and "reel-nano" in message
    (tmp_path / "run.json").write_text("{}")
    assert "is a run" in error_message(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
def test_unknown_hub_name_raises(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = error_message(name)
    assert "reel-nano" in message and "hub" in message


CONFIGS = ["{", "[]", "3", "null", '{"a": ' * 5000 + "1" + "}" * 5000]
BAD_VALUES = [{"n_head": 0}, {"n_embd": "x"}, {"n_embd": 0}, {"n_positions": -4}, {"n_layer": -1}]
BAD_VALUES += [{"vocab_size": None}, {"dtype": "junk"}, {"model_type": ["gpt2"]}]
BAD_VALUES += [{"model_type": None}, {"layer_norm_epsilon": "small"}, {"activation_function": "x"}]


@pytest.mark.parametrize("config", [*CONFIGS, *BAD_VALUES], ids=lambda x: str(x)[:40])
def test_invalid_config_raises_one_line(copied, config):
    if isinstance(config, str):
        (copied / "config.json").write_text(config)
    else:
        change_config(copied, **config)
    error_message(str(copied))


@pytest.mark.parametrize("content", [None, 2000, b"xy" * 500, b""], ids=str)
def test_missing_or_corrupt_weights_raise(copied, content):
    path = copied / "model.safetensors"
    stored = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(stored[:content] if isinstance(content, int) else content)
    assert content is not None or path.name in error_message(str(copied))
    error_message(str(copied))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (None, "is missing"),  # transformers would draw it at random
        (torch.zeros(3, 4), "has shape [3, 4], expected [16, 64]"),
        (torch.full((16, 64), torch.nan), "contains nan or inf"),
        (torch.full((16, 64), torch.inf), "contains nan or inf"),
    ],
    ids=["missing", "shape", "nan", "inf"],
)
def test_incomplete_weights_raise_by_name(copied, weight, expected):
    weights = load_file(copied / "model.safetensors") | {FC_WEIGHT: weight}
    weights = {name: x for name, x in weights.items() if x is not None}
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert f"{FC_WEIGHT} {expected}" in error_message(str(copied))


def test_layers_left_out_by_config_raise(copied):
    for n_layer in (1, 0):
        change_config(copied, n_layer=n_layer)
        assert "is in a layer that config.json leaves out" in error_message(str(copied))


def test_missing_or_corrupt_tokenizer_raises(copied):
    (copied / "tokenizer.json").write_text("{")
    assert "tokenizer" in error_message(str(copied))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    assert "no tokenizer files" in error_message(str(copied))


def test_missing_tokenizer_config_warns(copied):
    (copied / "tokenizer_config.json").unlink()
    with pytest.warns(UserWarning, match="has no tokenizer_config.json"):
        load_model(str(copied))


def test_token_without_embedding_raises(copied):
    tokenizer = AutoTokenizer.from_pretrained(str(copied), local_files_only=True)
    rows = load_file(copied / "model.safetensors")["transformer.wte.weight"].shape[0]
    tokenizer.add_tokens([f"new{i}" for i in range(rows)])
    tokenizer.save_pretrained(copied)
    message = error_message(str(copied))
    assert f"{rows} embeddings" in message and f"the id {len(tokenizer) - 1}" in message


def test_unsupported_architecture_raises(tmp_path, gpt2_tokenizer, save_model):
    model = BloomForCausalLM(BloomConfig(vocab_size=21, hidden_size=16, n_layer=1, n_head=2))
    message = error_message(str(save_model(model, gpt2_tokenizer, tmp_path / "other")))
    assert "BloomForCausalLM is not supported" in message
    assert "GPT2LMHeadModel" in message and "LlamaForCausalLM" in message


CODE = 'import pathlib; pathlib.Path(__file__).with_name("ran").touch()'


@pytest.mark.parametrize("kind", ["unheard-of", "gpt2"])
def test_custom_code_is_not_run_and_not_prompted_for(copied, monkeypatch, tmp_path, kind):
    """At a terminal, transformers would run it after a y."""
    prompts = []
    monkeypatch.setattr("builtins.input", lambda *text: prompts.append(text) or "y")
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    (copied / "evil.py").write_text(CODE)
    loaders = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    auto_map = {"AutoConfig": "evil.Config"} | dict.fromkeys(loaders, "evil.Model")
    change_config(copied, model_type=kind, auto_map=auto_map)
    if kind == "unheard-of":
        for load in (load_model, SentimentReward):
            with pytest.raises(LoadError, match="custom code, which is not run"):
                load(str(copied))
    else:
        load_model(str(copied))
    assert not prompts and not list(tmp_path.rglob("ran"))


def test_pickled_weights_are_never_read(copied):
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    load_model(str(copied))
    (copied / "model.safetensors").unlink()
    assert "safetensors" in error_message(str(copied))
    (copied / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "safetensors" in error_message(str(copied))
