"""Tests of the export: plain transformers and this package load what was trained."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import LoadError
from rlhf_lab.models import (
    TransformerWithValueHead,
    add_lora,
    build_policy,
    export,
    load_model,
    make_policy,
)

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5, 8, 8, 1], [12, 4, 19, 6, 8, 10, 0, 3, 2]])


def train_briefly(policy, steps=5):
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-2)
    for _ in range(steps):
        logits, values = policy(TOKENS)
        loss = -logits.log_softmax(-1)[..., 3].mean() + (values - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


@torch.no_grad()
def hf_logprobs(directory):
    model = AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True).eval()
    return model(TOKENS).logits.log_softmax(-1)


@pytest.fixture
def learned(model_dir):
    return train_briefly(make_policy(load_model(str(model_dir))))


def test_fold_b_U_matches_hand_computed():
    """gain [1, 2], bias [1, 0], W_U [[1], [3]], b_U [4]: u = [1, 1/2], u.u = 5/4, bias.u = 1;
    d = u (1 - 4/5) = [.2, .1], b' = [1.2, .1], c = (4 - (.2 * 1 + .1 * 3)) / (5/4) = 2.8,
    W_U' = [1 + 2.8, 3 + 1.4] = [3.8, 4.4]; b' W_U' = 4.56 + .44 = 5 = bias W_U + b_U = 1 + 4.
    """
    numbers = ([1.0, 2.0], [1.0, 0.0], [[1.0], [3.0]], [4.0])
    gain, bias, W_U, b_U = map(torch.tensor, numbers)
    new_bias, new_W_U = export.fold_b_U(gain, bias, W_U, b_U)
    assert new_bias.tolist() == pytest.approx([1.2, 0.1])
    assert new_W_U[:, 0].tolist() == pytest.approx([3.8, 4.4])
    x = torch.tensor([[0.7, -0.7]], dtype=torch.float64)  # any centered activation
    expected = (x * gain + bias) @ W_U.double() + b_U
    torch.testing.assert_close((x * gain + new_bias) @ new_W_U, expected, atol=1e-12, rtol=0)
    with pytest.raises(LoadError, match=r"ln_final.w contains 0"):
        export.fold_b_U(torch.zeros(2), bias, W_U, b_U)


def test_logprob_gap_matches_hand_computed():
    """Probabilities (1/2, 1/2) and (1/4, 3/4): the log-probs differ by ln 2 and ln 1.5."""
    gap = export.logprob_gap(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3)]]))
    low, high = math.log(2), math.log(1.5)
    assert gap.weighed == pytest.approx(3 / 8 * low + 5 / 8 * high)
    assert gap.relative == pytest.approx(low / (1 + math.log(2)))
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0))
    assert max(export.logprob_gap(logits, logits.double() + 7)) < 1e-6  # logits are relative
    for x in (math.nan, math.inf):
        assert export.logprob_gap(logits, torch.full_like(logits, x)) == (math.inf, math.inf)
    logits = torch.tensor([[0.0, -23.7]], dtype=torch.float64)
    gap = export.logprob_gap(logits, logits + torch.tensor([[0.0, 3.56e-4]]))  # rounding on SmolLM2
    assert gap.weighed < 1e-12 and gap.relative == pytest.approx(3.56e-4 / 24.7, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "adapters", "separate"])
def test_transformers_and_this_package_load_the_export(model_dir, tmp_path, kind):
    model = load_model(str(model_dir))
    if kind == "adapters":
        add_lora(model, 2, 8.0, ("W_Q", "W_K", "W_O", "W_in"))
    policy = train_briefly(make_policy(model, "separate" if kind == "separate" else "shared"))
    with torch.no_grad():
        logits, values = policy(TOKENS)
    expected, critic = logits.log_softmax(-1), "critic" if kind == "separate" else ""
    assert (expected - hf_logprobs(model_dir)).abs().max() > 0.1
    policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x.flip(-1))
    with pytest.warns(UserWarning, match=r"lacks hooks: base_model.blocks.0.hook_resid_post"):
        out, gap = export.export_policy(policy, str(model_dir), tmp_path / "out")
    assert policy.base_model.hook_dict["blocks.0.hook_resid_post"].fwd_hooks
    assert max(gap) <= 1e-4 and [path.name for path in tmp_path.iterdir()] == ["out"]
    torch.testing.assert_close(hf_logprobs(out), expected, atol=1e-4, rtol=0)
    reloaded = TransformerWithValueHead(load_model(str(out / critic)), export.load_value_head(out))
    torch.testing.assert_close(reloaded(TOKENS)[1], values, atol=1e-4, rtol=0)


def test_export_keeps_config_and_warns_of_the_value_head(learned, model_dir, tmp_path):
    model_dir = shutil.copytree(model_dir, tmp_path / "base")
    generation = model_dir / "generation_config.json"
    generation.write_text(json.dumps({"do_sample": True, "eos_token_id": [2, 5], "top_k": 7}))
    out, _ = export.export_policy(learned, str(model_dir), tmp_path / "out")
    new, old = (json.loads((d / "config.json").read_text()) for d in (out, model_dir))
    changed = {name: new[name] for name in ("dtype", "transformers_version")}
    assert new == old | changed | {"tie_word_embeddings": False}  # they are trained separately
    for name in ("tokenizer.json", "generation_config.json"):
        new, old = (json.loads((d / name).read_text()) for d in (out, model_dir))
        new["transformers_version"] = old["transformers_version"] = 0
        assert new == old
    with pytest.warns(UserWarning, match="the trained value head in base_model=.* is not used"):
        build_policy(RLHFArgs(base_model=str(out)))


def test_model_that_cannot_be_converted_keeps_its_weights(llama_dir, tmp_path):
    model, inputs, notes = load_model(str(llama_dir)), (str(llama_dir), tmp_path / "out"), {"a": 1}
    model.blocks[1].mlp.b_out.data[0] = 0.5
    with pytest.raises(LoadError, match=r"blocks.1.mlp.b_out is not 0.*are in .*out-unverified\.$"):
        export.export_language_model(model, *inputs, notes)
    with pytest.raises(LoadError, match=r"out-unverified-2\.$"):
        export.export_policy(make_policy(model), *inputs)
    language_model, policy = sorted(tmp_path.iterdir())
    assert json.loads((language_model / "tuning.json").read_text()) == notes
    assert (policy / "value_head.safetensors").exists()
    weights = load_file(policy / "hooked.safetensors")
    assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())


FAULTS = {
    "heads flipped": (("c_proj.weight", "o_proj.weight"), lambda x: x.flip(0)),
    "norm scaled": (("ln_1.weight", "input_layernorm.weight"), lambda x: x * 1.01),
    "one token less likely": ("lm_head.weight", lambda x: torch.cat([x[:5], 0.9 * x[5:6], x[6:]])),
    "nan": ("lm_head.weight", lambda x: x * math.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_model_that_differs_is_unverified(learned, model_dir, tmp_path, monkeypatch, fault):
    endings, change = FAULTS[fault]
    convert = export.to_hugging_face_weights

    def convert_wrongly(hf_model, parameters):
        weights = convert(hf_model, parameters)
        name = next(name for name in weights if name.endswith(endings))
        return weights | {name: change(weights[name])}

    monkeypatch.setattr(export, "to_hugging_face_weights", convert_wrongly)
    for name in ("out-unverified", "out-unverified-2"):
        with pytest.raises(LoadError, match=rf"(differ by|nan or inf).* are in .*{name}\.$"):
            export.export_policy(learned, str(model_dir), tmp_path / "out")
        kept = {path.name for path in (tmp_path / name).iterdir()}
        assert {"model.safetensors", "hooked.safetensors", "value_head.safetensors"} <= kept
    assert len(list(tmp_path.iterdir())) == 2


def test_interrupted_export_leaves_no_directory(tmp_path):
    with pytest.raises(KeyboardInterrupt), export.new_directory(tmp_path / "out"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
