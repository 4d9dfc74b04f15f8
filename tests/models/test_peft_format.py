"""LoRA adapters in PEFT's format: peft's logits are ours, both ways."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import add_lora, export_adapter, load_adapter, load_model, lora_layers
from rlhf_lab.models.peft_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.tiny_families import TINY, tiny_of
from tests.tiny_models import gpt2_tokenizer, llama_tokenizer, save, tiny_gpt2, tiny_llama

peft = pytest.importorskip("peft")
TOKENS = torch.randint(21, (3, 9), generator=torch.Generator().manual_seed(0))
ALL = {
    "gpt2": ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"),
    "llama": ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_gate"),
}
THEIRS = {
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def base(request, tmp_path_factory):
    """The kind of a tiny model, and its directory."""
    place = tmp_path_factory.mktemp("base") / "model"
    if request.param == "gpt2":
        save(tiny_gpt2(), gpt2_tokenizer(), place)
    else:
        save(tiny_llama(), llama_tokenizer(), place)
    return request.param, str(place)


def trained(directory, targets, rank=3, alpha=7.0):
    """A model whose adapters change something."""
    model = load_model(directory)
    add_lora(model, rank, alpha, targets)
    generator = torch.Generator().manual_seed(1)
    for layer in lora_layers(model).values():
        layer.B.data = 0.3 * torch.randn(layer.B.shape, generator=generator)
    return model


@torch.no_grad()
def logits(model):
    if isinstance(model, PreTrainedModel | peft.PeftModel):
        return model.eval()(TOKENS).logits
    return model(TOKENS, attention_mask=torch.ones_like(TOKENS))


def with_peft(directory, adapter):
    model = AutoModelForCausalLM.from_pretrained(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as of keys that were not found
        return peft.PeftModel.from_pretrained(model, str(adapter))


def of_peft(directory, out, seed=2, **settings):
    """An adapter that peft made and wrote."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fan_in_fan_out, which it sets itself
        model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(str(out))
    return model


@pytest.mark.parametrize("targets", ["all", "W_Q,W_V", "W_K,W_O", "W_out"])
def test_peft_reads_what_is_exported(base, targets, tmp_path):
    kind, directory = base
    model = trained(directory, ALL[kind] if targets == "all" else targets.split(","))
    gap = export_adapter(model, directory, tmp_path / "adapter")
    theirs = logits(with_peft(directory, tmp_path / "adapter"))
    torch.testing.assert_close(logits(model), theirs, atol=1e-4, rtol=0)
    assert gap.holds and (theirs - logits(load_model(directory))).abs().max() > 0.1
    again = load_model(directory)
    load_adapter(again, tmp_path / "adapter", directory)
    before, after = lora_layers(model), lora_layers(again)
    assert before.keys() == after.keys()
    for name, layer in before.items():
        assert layer.rank == after[name].rank and layer.alpha == pytest.approx(after[name].alpha)
        assert torch.equal(layer.A, after[name].A) and torch.equal(layer.B, after[name].B)
    trainable = {name for name, weight in again.named_parameters() if weight.requires_grad}
    assert len(trainable) == 2 * len(after) and all(".parametrizations." in n for n in trainable)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 3, "lora_alpha": 7},
        {"r": 4, "lora_alpha": 2, "use_rslora": True},
        {"r": 2, "lora_alpha": 5, "layers_to_transform": [1]},
    ],
)
def test_what_peft_writes_is_read(base, settings, tmp_path):
    kind, directory = base
    theirs = of_peft(directory, tmp_path / "a", target_modules=THEIRS[kind], **settings)
    model = load_model(directory)
    load_adapter(model, tmp_path / "a", directory)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-4, rtol=0)
    assert (logits(theirs) - logits(load_model(directory))).abs().max() > 0.1
    export_adapter(model, directory, tmp_path / "b")
    back = logits(with_peft(directory, tmp_path / "b"))
    torch.testing.assert_close(back, logits(theirs), atol=1e-4, rtol=0)


def test_ranks_and_alphas_may_differ_by_module(base, tmp_path):
    kind, directory = base
    first, second = THEIRS[kind][:2]
    patterns = {"rank_pattern": {first: 5, f".*0.*{second}": 2}, "alpha_pattern": {second: 9}}
    theirs = of_peft(directory, tmp_path / "a", target_modules=[first, second], r=3, **patterns)
    model = load_model(directory)
    load_adapter(model, tmp_path / "a", directory)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-4, rtol=0)
    assert {layer.rank for layer in lora_layers(model).values()} == {5, 2, 3}
    export_adapter(model, directory, tmp_path / "b")
    back = logits(with_peft(directory, tmp_path / "b"))
    torch.testing.assert_close(back, logits(theirs), atol=1e-4, rtol=0)


def test_a_fresh_adapter_of_peft_begins_as_the_model_and_can_learn(base, tmp_path):
    kind, directory = base
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=THEIRS[kind][:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, config).save_pretrained(str(tmp_path / "a"))
    ours = load_model(directory)
    load_adapter(ours, tmp_path / "a", directory)
    torch.testing.assert_close(logits(ours), logits(load_model(directory)), atol=1e-5, rtol=0)
    ours(TOKENS, attention_mask=torch.ones_like(TOKENS)).square().sum().backward()
    assert all(layer.B.grad.abs().max() > 0 for layer in lora_layers(ours).values())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3', which is not here"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
    ],
)
def test_another_kind_of_adapter_is_refused_by_name(base, change, complaint, tmp_path):
    _, directory = base
    export_adapter(trained(directory, ["W_O"]), directory, tmp_path / "a")
    path = tmp_path / "a" / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    model = load_model(directory)
    with pytest.raises(LoadError, match=complaint):
        load_adapter(model, tmp_path / "a", directory)
    assert not lora_layers(model) and all(weight.requires_grad for weight in [model.W_E])


def test_dropout_is_said_and_broken_files_are_refused(base, tmp_path):
    _, directory = base
    export_adapter(trained(directory, ["W_O"]), directory, tmp_path / "a")
    path, weights = tmp_path / "a" / ADAPTER_CONFIG, tmp_path / "a" / ADAPTER_WEIGHTS
    tensors = {name: x.clone() for name, x in load_file(weights).items()}  # the file is overwritten
    key = next(iter(sorted(tensors)))

    def refusal(**changed):
        save_file({k: v for k, v in (tensors | changed).items() if v is not None}, weights)
        with pytest.raises(LoadError) as error:
            load_adapter(load_model(directory), tmp_path / "a", directory)
        save_file(tensors, weights)
        return str(error.value)

    assert "no fitting pair" in refusal(**{key: None})
    assert "no matrix of finite numbers" in refusal(**{key: tensors[key] * torch.nan})
    assert "inputs and" in refusal(**{key: tensors[key][:, :-1].contiguous()})
    assert "which is no LoRA matrix" in refusal(**{"base_model.model.x.bias": torch.ones(2)})
    pair = {f"base_model.model.lm_head.lora_{x}.weight": torch.ones(1, 1) for x in "AB"}
    assert "changes lm_head, which is no matrix of the blocks" in refusal(**pair)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.1}))
    model = load_model(directory)
    with pytest.warns(UserWarning, match="lora_dropout=0.1, and there is no dropout here"):
        load_adapter(model, tmp_path / "a", directory)
    with pytest.raises(ConfigError, match="has LoRA adapters already"):
        load_adapter(model, tmp_path / "a", directory)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(LoadError, match="as safetensors, since other files could run code"):
        load_adapter(load_model(directory), tmp_path / "a", directory)
    with pytest.raises(LoadError, match="is no adapter of PEFT's"):
        load_adapter(load_model(directory), tmp_path / "nowhere", directory)


def test_a_model_without_adapters_has_none_to_export(base, tmp_path):
    _, directory = base
    with pytest.raises(LoadError, match="no LoRA adapters"):
        export_adapter(load_model(directory), directory, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("architecture", sorted(set(TINY) - {"GPT2LMHeadModel"}))
def test_all_architectures_have_places(architecture, tmp_path):
    """Also where matrices are fused, or stand in another order."""
    directory = str(save(tiny_of(architecture), llama_tokenizer(), tmp_path / "base"))
    gated = hasattr(load_model(directory).blocks[0].mlp, "W_gate")
    model = trained(directory, ALL["llama" if gated else "gpt2"])
    export_adapter(model, directory, tmp_path / "a")
    theirs = logits(with_peft(directory, tmp_path / "a"))
    torch.testing.assert_close(logits(model), theirs, atol=1e-4, rtol=1e-4)
    other = of_peft(directory, tmp_path / "b", r=3, target_modules="all-linear")
    again = load_model(directory)
    load_adapter(again, tmp_path / "b", directory)
    torch.testing.assert_close(logits(again), logits(other), atol=1e-4, rtol=1e-4)
    assert (logits(other) - logits(load_model(directory))).abs().max() > 0.01
