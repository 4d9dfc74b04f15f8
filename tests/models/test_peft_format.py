"""Tests of PEFT's format in both directions: the logits of peft are ours."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import add_lora, export_adapter, load_adapter, load_model, lora_layers
from rlhf_lab.models.lora import LORA_TARGETS
from rlhf_lab.models.peft_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.tiny_families import TINY, tiny_of
from tests.tiny_models import save

peft = pytest.importorskip("peft")
TOKENS = torch.randint(21, (3, 9), generator=torch.Generator().manual_seed(0))
PEFT_TARGETS = {
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@pytest.fixture(params=["gpt2", "llama"])
def base(request):
    return request.param, str(request.getfixturevalue(f"{request.param}_dir"))


def make_adapted(directory, targets="all"):
    model = load_model(directory)
    every = LORA_TARGETS if model.cfg.gated_mlp else LORA_TARGETS[:-1]
    add_lora(model, 3, 7.0, every if targets == "all" else targets.split(","))
    generator = torch.Generator().manual_seed(1)
    for layer in lora_layers(model).values():
        layer.B.data = 0.3 * torch.randn(layer.B.shape, generator=generator)
    return model


def make_with_peft(directory, out, b_size=0.3, **settings):
    model = AutoModelForCausalLM.from_pretrained(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT sets fan_in_fan_out
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            size = b_size if "lora_B" in name else 0.3
            weight.data = size * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(str(out))
    return model


@torch.no_grad()
def logits(model):
    if isinstance(model, PreTrainedModel | peft.PeftModel):
        return model.eval()(TOKENS).logits
    return model(TOKENS, attention_mask=torch.ones_like(TOKENS))


def assert_peft_loads(directory, adapter, expected):
    model = AutoModelForCausalLM.from_pretrained(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as missing keys
        theirs = logits(peft.PeftModel.from_pretrained(model, str(adapter)))
    torch.testing.assert_close(theirs, expected, atol=1e-4, rtol=1e-4)
    assert (theirs - logits(load_model(directory))).abs().max() > 0.01


@pytest.mark.parametrize("targets", ["all", "W_Q,W_V", "W_K,W_O", "W_out"])
def test_peft_and_this_package_load_exported_adapters(base, targets, tmp_path):
    _, directory = base
    model, again = make_adapted(directory, targets), load_model(directory)
    export_adapter(model, directory, tmp_path / "a")
    assert_peft_loads(directory, tmp_path / "a", logits(model))
    load_adapter(again, tmp_path / "a", directory)
    before, after = lora_layers(model), lora_layers(again)
    assert before.keys() == after.keys()
    for name, layer in before.items():
        assert layer.rank == after[name].rank and layer.alpha == pytest.approx(after[name].alpha)
        assert torch.equal(layer.A, after[name].A) and torch.equal(layer.B, after[name].B)
    trainable = {name for name, weight in again.named_parameters() if weight.requires_grad}
    assert len(trainable) == 2 * len(after) and all(".parametrizations." in n for n in trainable)


OF_PEFT = {"plain": {"r": 3, "lora_alpha": 7}, "patterns": {"r": 3}}
OF_PEFT |= {"rsLoRA": {"r": 4, "lora_alpha": 2, "use_rslora": True}}
OF_PEFT |= {"one layer": {"r": 2, "lora_alpha": 5, "layers_to_transform": [1]}}


@pytest.mark.parametrize("settings", OF_PEFT.values(), ids=OF_PEFT)
def test_adapters_of_peft_are_loaded_and_exported(base, settings, tmp_path):
    (kind, directory), ranks = base, {settings["r"]}
    names = PEFT_TARGETS[kind]
    if settings == {"r": 3}:
        names, ranks = names[:2], {5, 2, 3}
        patterns = {names[0]: 5, f".*0.*{names[1]}": 2}
        settings = settings | {"rank_pattern": patterns, "alpha_pattern": {names[1]: 9}}
    theirs = make_with_peft(directory, tmp_path / "a", target_modules=names, **settings)
    model = load_model(directory)
    load_adapter(model, tmp_path / "a", directory)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-4, rtol=0)
    assert {layer.rank for layer in lora_layers(model).values()} == ranks
    export_adapter(model, directory, tmp_path / "b")
    assert_peft_loads(directory, tmp_path / "b", logits(theirs))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(set(TINY) - {"GPT2LMHeadModel"}))
def test_adapters_of_all_architectures_match_peft(architecture, llama_tokenizer, tmp_path):
    directory = str(save(tiny_of(architecture), llama_tokenizer, tmp_path / "base"))
    model, again = make_adapted(directory), load_model(directory)
    export_adapter(model, directory, tmp_path / "a")
    assert_peft_loads(directory, tmp_path / "a", logits(model))
    theirs = make_with_peft(directory, tmp_path / "b", r=3, target_modules="all-linear")
    load_adapter(again, tmp_path / "b", directory)
    torch.testing.assert_close(logits(again), logits(theirs), atol=1e-4, rtol=1e-4)


SETTINGS = [{"peft_type": "IA3"}, {"use_dora": True}, {"bias": "all"}, {"a_later_option": 1}]
SETTINGS += [{"init_lora_weights": "pissa"}, {"layer_replication": [[0]]}, {"modules_to_save": [1]}]


@pytest.mark.slow
@pytest.mark.typed
def test_unsupported_settings_and_damaged_files_raise(base, tmp_path):
    _, directory = base
    export_adapter(make_adapted(directory, "W_O"), directory, tmp_path / "a")
    path, weights = tmp_path / "a" / ADAPTER_CONFIG, tmp_path / "a" / ADAPTER_WEIGHTS
    config, tensors = json.loads(path.read_text()), load_file(weights)
    tensors = {name: x.clone() for name, x in tensors.items()}  # the file is overwritten
    key = min(tensors)

    def message(settings, **changed):
        save_file({k: v for k, v in (tensors | changed).items() if v is not None}, weights)
        path.write_text(json.dumps(config | settings))
        model = load_model(directory)
        with pytest.raises(LoadError) as error:
            load_adapter(model, tmp_path / "a", directory)
        assert not lora_layers(model) and model.W_E.requires_grad
        return str(error.value)

    for settings in SETTINGS:
        name, value = next(iter(settings.items()))
        assert f"has {name}={value!r}, which is not supported" in message(settings)
    assert "config.json has rank 9, adapter_model.safetensors has rank" in message({"r": 9})
    for bad in ({key: tensors[key] * torch.nan}, {"base_model.model.x.bias": torch.ones(2)}):
        assert "not a finite LoRA matrix" in message({}, **bad)
    pair = {f"base_model.model.lm_head.lora_{x}.weight": torch.ones(1, 1) for x in "AB"}
    for bad in ({key: None}, {key: tensors[key][:, :-1].contiguous()}, pair):
        assert "does not fit" in message({}, **bad)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    for place in (tmp_path / "a", tmp_path / "missing"):
        with pytest.raises(LoadError, match="not a PEFT adapter.*Use one of `export"):
            load_adapter(load_model(directory), place, directory)


def test_export_joins_adapters_of_different_scales(gpt2_dir, tmp_path):
    directory, model = str(gpt2_dir), make_adapted(str(gpt2_dir), "W_Q,W_V")
    lora_layers(model)["blocks.0.attn.W_V"].alpha *= 2
    export_adapter(model, directory, tmp_path / "a")
    assert_peft_loads(directory, tmp_path / "a", logits(model))


def test_dropout_warns_and_wrong_models_raise(gpt2_dir, tmp_path):
    settings = {"target_modules": ["c_attn"], "lora_dropout": 0.1}
    make_with_peft(gpt2_dir, tmp_path / "a", b_size=0, **settings)  # as a new adapter
    model = load_model(gpt2_dir)
    with pytest.raises(LoadError, match="no LoRA adapters"):
        export_adapter(model, str(gpt2_dir), tmp_path / "b")
    assert not (tmp_path / "b").exists()
    with pytest.warns(UserWarning, match="lora_dropout is ignored"):
        load_adapter(model, tmp_path / "a", str(gpt2_dir))
    model(TOKENS).square().sum().backward()
    layers = lora_layers(model).values()
    assert layers and all(layer.B.grad.any() for layer in layers)
    with pytest.raises(ConfigError, match="already has LoRA adapters"):
        load_adapter(model, tmp_path / "a", str(gpt2_dir))
