"""Tests of loading: against plain transformers, without the network, and from damaged files."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from rlhf_lab.errors import LoadError
from rlhf_lab.models import load as load_module
from rlhf_lab.models import load_model
from rlhf_lab.rewards import SentimentReward
from tests.tiny_families import CONTEXT, TINY, tiny_of
from tests.tiny_models import save, tiny_gpt2

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5, 5, 18], [12, 4, 19, 6, 8, 0, 15, 10]])


def load_plain(place, **options):
    return AutoModelForCausalLM.from_pretrained(str(place), local_files_only=True, **options).eval()


@torch.no_grad()
def assert_same_logits(model, hf_model):
    expected = hf_model(TOKENS).logits
    assert expected.std() > 0.1  # constant logits would be equal by accident
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-4, rtol=0)


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


@pytest.mark.parametrize("architecture", TINY)
def test_directory_matches_transformers(
    architecture, llama_tokenizer, tmp_path, monkeypatch, no_network
):
    directory = save(tiny_of(architecture), llama_tokenizer, tmp_path / "tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(directory), "~/tiny"):
        model = load_model(name)
        assert_same_logits(model, load_plain(directory))
        assert (model.cfg.model_name, model.cfg.n_ctx) == (name, CONTEXT)


def test_models_can_be_loaded_in_threads(gpt2_dir):
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(load_model, [str(gpt2_dir)] * 6))
    assert_same_logits(models[0], load_plain(gpt2_dir))


def test_loaded_model_is_converted_and_not_changed(model_dir, no_network):
    hf_model = load_plain(model_dir).train()
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    before = {name: value.clone() for name, value in hf_model.state_dict().items()}
    config = hf_model.config.to_dict()
    enable_progress_bar()
    with load_module.hidden_progress():
        assert not is_progress_bar_enabled()
    model = load_model(hf_model, tokenizer)
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert hf_model.training and is_progress_bar_enabled()
    assert_same_logits(model, hf_model.eval())
    for parameter in model.parameters():
        parameter.data += 1
    assert hf_model.config.to_dict() == config
    assert all(torch.equal(value, before[k]) for k, value in hf_model.state_dict().items())


def test_dtype_device_and_name_are_set(tmp_path, gpt2_tokenizer):
    directory = str(save(tiny_gpt2().half(), gpt2_tokenizer, tmp_path / "half"))
    for options in ({}, {"dtype": torch.float64}, {"device": "meta"}):
        model = load_model(directory, **options)
        dtype, device = options.get("dtype", torch.float32), options.get("device", "cpu")
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(dtype, device)}
        assert (model.cfg.dtype, str(model.cfg.device)) == (dtype, device)
        assert model.cfg.model_name == directory


@pytest.mark.parametrize("lost", ["bias", "window"])
def test_conversion_with_other_logits_raises(lost, llama_tokenizer, monkeypatch):
    convert = load_module.from_hugging_face

    def convert_wrongly(*inputs):
        model = convert(*inputs)
        if lost == "bias":
            model.blocks[0].attn.b_Q.data.zero_()
        else:
            model.cfg.window_size = CONTEXT
        return model

    monkeypatch.setattr(load_module, "from_hugging_face", convert_wrongly)
    hf_model = tiny_of("Gemma3ForCausalLM", sliding_window=30, attention_bias=True)
    assert "its logits differ" in error_message(hf_model, tokenizer=llama_tokenizer)


def test_name_without_a_model_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "missing"), str(tmp_path)):
        message = error_message(name)
        assert "no model directory" in message and "reel-nano" in message
    for name in ("nobody/no-such-model", "no-such-model"):
        message = error_message(name)
        assert "reel-nano" in message and "hub" in message
    (tmp_path / "run.json").write_text("{}")
    assert "is a run" in error_message(str(tmp_path))


CONFIGS = ["{", "[]", "null", '{"a": ' * 5000 + "1" + "}" * 5000, {"n_head": 0}, {"n_layer": -1}]
CONFIGS += [{"n_embd": "x"}, {"vocab_size": None}, {"model_type": None}, {"dtype": "junk"}]


def test_invalid_config_raises_one_line(copied):
    path = copied / "config.json"
    valid = json.loads(path.read_text())
    for config in CONFIGS:
        path.write_text(json.dumps(valid | config) if isinstance(config, dict) else config)
        error_message(str(copied))


def test_corrupt_or_left_out_weights_raise(copied):
    for n_layer in (0, 1):
        change_config(copied, n_layer=n_layer)
        assert "is in a layer that config.json leaves out" in error_message(str(copied))
    path = copied / "model.safetensors"
    for content in (path.read_bytes()[:2000], b"xy" * 500, b""):
        path.write_bytes(content)
        error_message(str(copied))


UNUSABLE = [(None, "{} is missing")]  # transformers would draw it at random
UNUSABLE += [(torch.zeros(3, 4), "{} has shape [3, 4], expected [16, 64]")]
UNUSABLE += [(torch.full((16, 64), x), "{} contains nan or inf") for x in (torch.nan, torch.inf)]


@pytest.mark.parametrize(("weight", "message"), UNUSABLE, ids=["missing", "shape", "nan", "inf"])
def test_unusable_weight_raises_with_its_name(copied, weight, message):
    name, path = "transformer.h.1.mlp.c_fc.weight", copied / "model.safetensors"
    weights = {k: x for k, x in (load_file(path) | {name: weight}).items() if x is not None}
    save_file(weights, path, metadata={"format": "pt"})
    error = error_message(str(copied))
    assert name in error and message.format(name) in error


def test_unfit_tokenizer_raises(copied):
    tokenizer = AutoTokenizer.from_pretrained(str(copied), local_files_only=True)
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(copied)
    message = error_message(str(copied))
    assert "'new' with the id 21" in message and "21 embeddings" in message
    (copied / "tokenizer_config.json").unlink()
    (copied / "tokenizer.json").write_text("{")
    assert "tokenizer" in error_message(str(copied))
    (copied / "tokenizer.json").unlink()
    assert "no tokenizer files" in error_message(str(copied))


def test_tokenizer_without_configuration_warns(copied):
    """Transformers would make GPT-2's tokenizer, which puts no space between words."""
    (copied / "tokenizer_config.json").unlink()
    with pytest.warns(UserWarning, match="has no tokenizer_config.json"):
        load_model(str(copied))


def test_unsupported_architecture_raises(gpt2_tokenizer):
    model = BloomForCausalLM(BloomConfig(vocab_size=21, hidden_size=16, n_layer=1, n_head=2))
    message = error_message(model, tokenizer=gpt2_tokenizer)
    assert "BloomForCausalLM is not supported" in message and "LlamaForCausalLM" in message


@pytest.mark.parametrize("kind", ["unheard-of", "gpt2"])
def test_custom_code_is_not_run_and_not_prompted_for(copied, monkeypatch, tmp_path, kind):
    """At a terminal, transformers would run it after a y."""
    prompts, code = [], 'import pathlib; pathlib.Path(__file__).with_name("ran").touch()'
    monkeypatch.setattr("builtins.input", lambda *text: prompts.append(text) or "y")
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    (copied / "evil.py").write_text(code)
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    auto_map = dict.fromkeys(names, "evil.Model")
    change_config(copied, model_type=kind, auto_map=auto_map)
    if kind == "unheard-of":
        for load in (load_model, SentimentReward):
            with pytest.raises(LoadError, match="custom code, which is not run"):
                load(str(copied))
    else:
        load_model(str(copied))
    assert not prompts and not list(tmp_path.rglob("ran"))


def test_pickled_weights_are_never_read(copied):
    weights = load_file(copied / "model.safetensors")
    torch.save(weights, copied / "pytorch_model.bin")
    load_model(str(copied))
    (copied / "model.safetensors").unlink()
    assert "model.safetensors" in error_message(str(copied))
    for name in ("pytorch_model.bin", "model.safetensors"):
        (copied / name).write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
        assert "safetensors" in error_message(str(copied))
    assert not Path("ran").exists()
