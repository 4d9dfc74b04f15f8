"""Tests that an exported policy is the policy, as plain transformers and this package read it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_lab.errors import LoadError
from rlhf_lab.models import TransformerWithValueHead, add_lora, load_model, lora_layers, make_policy
from rlhf_lab.models import export as export_module
from rlhf_lab.models.export import (
    export_language_model,
    export_policy,
    fold_unembedding_bias,
    load_value_head,
)
from rlhf_lab.organism.bundled import weights_dir

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5, 8, 8, 1], [12, 4, 19, 6, 8, 10, 0, 3, 2]])


def trainable(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def train_a_little(policy, steps=5):
    """A few steps on every parameter that can be trained, biases included."""
    optimizer = torch.optim.AdamW(trainable(policy), lr=3e-2)
    for _ in range(steps):
        logits, values = policy(TOKENS)
        loss = -logits.log_softmax(-1)[..., 3].mean() + (values - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def hf_logprobs(directory, tokens=TOKENS):
    model = AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True).eval()
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1)


@pytest.fixture
def trained(model_dir):
    policy = make_policy(load_model(str(model_dir)))
    train_a_little(policy)
    return policy


def test_a_bias_of_the_unembedding_finds_its_place_worked_by_hand():
    """gain [1, 2], bias [1, 0], W_U [[1], [3]], b_U [4]: u = [1, 1/2], u.u = 5/4, bias.u = 1;
    d = u (1 - 4/5) = [.2, .1], b' = [1.2, .1], c = (4 - (.2 * 1 + .1 * 3)) / (5/4) = 2.8,
    W_U' = [1 + 2.8, 3 + 1.4] = [3.8, 4.4]; b' W_U' = 4.56 + .44 = 5 = bias W_U + b_U = 1 + 4.
    """
    bias, W_U = fold_unembedding_bias(
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 0.0]),
        torch.tensor([[1.0], [3.0]]),
        torch.tensor([4.0]),
    )
    assert bias.tolist() == pytest.approx([1.2, 0.1])
    assert W_U[:, 0].tolist() == pytest.approx([3.8, 4.4])


def test_a_folded_bias_gives_the_same_logits_for_every_centered_activation():
    generator = torch.Generator().manual_seed(0)
    gain, bias, b_U = (torch.randn(n, generator=generator).double() for n in (6, 6, 9))
    W_U = torch.randn(6, 9, generator=generator).double()
    x = torch.randn(50, 6, generator=generator).double()
    x = x - x.mean(-1, keepdim=True)
    new_bias, new_W_U = fold_unembedding_bias(gain, bias, W_U, b_U)
    expected = (x * gain + bias) @ W_U + b_U
    torch.testing.assert_close((x * gain + new_bias) @ new_W_U, expected, atol=1e-9, rtol=0)


def test_a_gain_of_0_is_refused():
    ones = torch.ones(2)
    with pytest.raises(LoadError, match="gain of 0"):
        fold_unembedding_bias(torch.tensor([1.0, 0.0]), ones, torch.ones(2, 2), ones)


@pytest.mark.slow
def test_plain_transformers_reads_the_trained_policy(trained, model_dir, tmp_path):
    before = hf_logprobs(model_dir)
    out, gap = export_policy(trained, str(model_dir), tmp_path / "out")
    found = hf_logprobs(out)
    with torch.no_grad():
        expected = trained(TOKENS)[0].log_softmax(-1)
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert gap.weighed <= 1e-4 and gap.holds
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_this_package_reads_it_too_with_its_value_head(trained, model_dir, tmp_path):
    out, _ = export_policy(trained, str(model_dir), tmp_path / "out")
    again = TransformerWithValueHead(load_model(str(out)), load_value_head(out))
    for found, expected in zip(again(TOKENS), trained(TOKENS), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_configuration_says_that_the_embeddings_are_untied(trained, model_dir, tmp_path):
    out, _ = export_policy(trained, str(model_dir), tmp_path / "out")
    new, old = (json.loads((d / "config.json").read_text()) for d in (out, model_dir))
    assert new["tie_word_embeddings"] is False
    assert new["architectures"] == old["architectures"]
    ignored = {"tie_word_embeddings", "dtype", "transformers_version"}
    assert {k: v for k, v in new.items() if k not in ignored} == {
        k: v for k, v in old.items() if k not in ignored
    }
    assert "lm_head.weight" in load_file(out / "model.safetensors")


def test_the_tokenizer_comes_along(trained, model_dir, tmp_path):
    out, _ = export_policy(trained, str(model_dir), tmp_path / "out")
    old, new = (AutoTokenizer.from_pretrained(str(d)) for d in (model_dir, out))
    assert new("w3 w7 w1").input_ids == old("w3 w7 w1").input_ids
    assert new.get_vocab() == old.get_vocab()


def test_an_untrained_policy_comes_back_bit_for_bit(model_dir, tmp_path):
    policy = make_policy(load_model(str(model_dir)))
    out, _ = export_policy(policy, str(model_dir), tmp_path / "out")
    old, new = (load_file(d / "model.safetensors") for d in (model_dir, out))
    for name, tensor in old.items():
        assert torch.equal(new[name], tensor), name


def test_a_llama_that_was_trained_stays_one(llama_dir):
    """Its biases cannot be trained, and are 0 still."""
    policy = make_policy(load_model(str(llama_dir)))
    train_a_little(policy)
    biases = {n: p for n, p in policy.base_model.named_parameters() if ".b_" in n or "._b_" in n}
    assert len(biases) == 2 * 6 + 1
    assert not any(p.requires_grad or p.any() for p in biases.values())


def test_a_bias_that_llama_has_no_place_for_is_refused(llama_dir, tmp_path):
    policy = make_policy(load_model(str(llama_dir)))
    policy.base_model.blocks[1].mlp.b_out.data[0] = 0.5
    with pytest.raises(LoadError, match="blocks.1.mlp.b_out is not 0"):
        export_policy(policy, str(llama_dir), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_adapters_are_exported_as_part_of_the_weights(model_dir, tmp_path):
    model = load_model(str(model_dir))
    add_lora(model, 2, 8.0, ("W_Q", "W_K", "W_O", "W_in"))
    policy = make_policy(model)
    train_a_little(policy)
    assert all(layer.B.any() for layer in lora_layers(model).values())
    out, _ = export_policy(policy, str(model_dir), tmp_path / "out")
    with torch.no_grad():
        expected = policy(TOKENS)[0].log_softmax(-1)
    torch.testing.assert_close(hf_logprobs(out), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_critic_goes_in_a_directory_of_its_own(model_dir, tmp_path):
    policy = make_policy(load_model(str(model_dir)), "separate")
    train_a_little(policy)
    out, _ = export_policy(policy, str(model_dir), tmp_path / "out")
    critic = TransformerWithValueHead(load_model(str(out / "critic")), load_value_head(out))
    torch.testing.assert_close(critic(TOKENS)[1], policy(TOKENS)[1], atol=1e-4, rtol=0)


def test_positions_beyond_the_context_are_kept(
    make_tiny_gpt2, gpt2_tokenizer, save_model, tmp_path
):
    directory = save_model(make_tiny_gpt2(n_ctx=16), gpt2_tokenizer, tmp_path / "long")
    policy = make_policy(load_model(str(directory)))
    assert policy.base_model.pos_embed.W_pos.shape[0] == 16
    out, _ = export_policy(policy, str(directory), tmp_path / "out")
    name = "transformer.wpe.weight"
    old, new = (load_file(d / "model.safetensors")[name] for d in (directory, out))
    assert torch.equal(new, old) and new.shape[0] == 24


def test_hooks_of_the_user_do_not_disturb_the_check_and_stay(trained, model_dir, tmp_path):
    trained.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x.flip(-1))
    export_policy(trained, str(model_dir), tmp_path / "out")
    assert trained.base_model.hook_dict["blocks.0.hook_resid_post"].fwd_hooks
    assert trained.base_model.cfg.dtype == torch.float32


def flip_heads(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(n for n in weights if n.endswith(("c_proj.weight", "o_proj.weight")))
    return {name: weights[name].flip(0)}


def scale_a_norm(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(n for n in weights if n.endswith(("ln_1.weight", "input_layernorm.weight")))
    return {name: weights[name] * 1.01}


def spoil_one_row(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The unembedding of one token among all, which comes to be less likely."""
    row = weights["lm_head.weight"].clone()
    row[5] *= 0.9
    return {"lm_head.weight": row}


def swap_queries_and_keys(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if "transformer.h.0.attn.c_attn.weight" in weights:
        q, k, v = weights["transformer.h.0.attn.c_attn.weight"].chunk(3, dim=1)
        return {"transformer.h.0.attn.c_attn.weight": torch.cat([k, q, v], dim=1)}
    name = "model.layers.0.self_attn.q_proj.weight"
    return {name: weights[name].flip(0)}


def scale_an_mlp(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(n for n in weights if n.endswith(("mlp.c_proj.weight", "down_proj.weight")))
    return {name: weights[name] * 0.97}


def lose_a_number(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    spoilt = weights["lm_head.weight"].clone()
    spoilt[0, 0] = torch.nan
    return {"lm_head.weight": spoilt}


@pytest.mark.parametrize(
    "fault",
    [
        flip_heads,
        scale_a_norm,
        spoil_one_row,
        swap_queries_and_keys,
        scale_an_mlp,
        lose_a_number,
    ],
)
def test_a_model_that_differs_is_kept_aside(trained, model_dir, tmp_path, monkeypatch, fault):
    right = export_module.to_hugging_face_weights

    def wrong(hf_model, parameters):
        weights = right(hf_model, parameters)
        return weights | fault(weights)

    monkeypatch.setattr(export_module, "to_hugging_face_weights", wrong)
    with pytest.raises(LoadError, match=r"(differ by|nan or inf).* is in .*out-unverified\.$"):
        export_policy(trained, str(model_dir), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out-unverified"]
    assert (tmp_path / "out-unverified" / "model.safetensors").exists()
    with pytest.raises(LoadError, match=r"out-unverified-2\.$"):
        export_policy(trained, str(model_dir), tmp_path / "out")


@pytest.mark.slow
def test_adapters_whose_product_is_beyond_single_precision_are_named(model_dir, tmp_path):
    model = load_model(str(model_dir))
    add_lora(model, 2, 8.0, ("W_Q",))
    policy = make_policy(model)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.A.fill_(1e30)
            layer.B.fill_(1e30)
    words = r"^the exported weight \S*attn\S* holds nan or inf, .*rates.*is in .*out-unverified\.$"
    with pytest.raises(LoadError, match=words) as refused:
        export_policy(policy, str(model_dir), tmp_path / "out")
    assert ".partial" not in str(refused.value) and "whole model" not in str(refused.value)
    assert (tmp_path / "out-unverified" / "value_head.safetensors").exists()


def test_a_tuned_model_that_cannot_be_converted_keeps_its_weights(llama_dir, tmp_path):
    model = load_model(str(llama_dir))
    model.blocks[1].mlp.b_out.data[0] = 0.5
    with pytest.raises(LoadError, match=r"b_out is not 0.*is in .*out-unverified\.$"):
        export_language_model(model, str(llama_dir), tmp_path / "out", {"method": "sft"})
    kept = tmp_path / "out-unverified"
    assert not (tmp_path / "out").exists()
    assert json.loads((kept / "tuning.json").read_text()) == {"method": "sft"}
    weights = load_file(kept / "hooked.safetensors")
    assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())


@pytest.mark.slow
def test_places_that_cannot_be_written_are_refused(trained, model_dir, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(LoadError, match="is there already"):
            export_policy(trained, str(model_dir), tmp_path / name)
    with pytest.raises(LoadError, match="cannot write"):
        export_policy(trained, str(model_dir), tmp_path / "file" / "out")
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_the_bundled_policy_is_exported(tmp_path):
    policy = make_policy(load_model("reel-nano"))
    train_a_little(policy, steps=2)
    out, gap = export_policy(policy, "reel-nano", tmp_path / "a" / "out")
    assert gap.weighed <= 1e-4 and gap.holds
    own, shipped = (d / "tokenizer.json" for d in (out, weights_dir("reel-nano")))
    assert json.loads(own.read_text()) == json.loads(shipped.read_text())


def test_a_directory_without_a_value_head_is_refused(gpt2_dir):
    with pytest.raises(LoadError, match="value_head.safetensors is no exported value head"):
        load_value_head(gpt2_dir)
