"""Tests of LoRA adapters: the changed weights, training, and models with adapters disabled."""

import copy

import einops
import pytest
import torch
from torch.func import functional_call

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import frozen_copy, has_hooks, load_model, merged_copy
from rlhf_lab.models.lora import (
    LORA_TARGETS,
    LoRALinear,
    adapters_off,
    add_lora,
    effective_weights,
    lora_layers,
    merged_lora,
    without_adapters,
)

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])
QKV, MATRIX = "m r, h r d -> h m d", "i r, r o -> i o"
BY_HAND = {"W_Q": QKV, "W_K": QKV, "W_V": QKV, "W_O": "h d r, r m -> h d m"}
BY_HAND |= {"W_in": MATRIX, "W_gate": MATRIX, "W_out": MATRIX}


def all_targets(model):
    return LORA_TARGETS if model.cfg.gated_mlp else LORA_TARGETS[:-1]


def randomize_factors(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        for factor in (layer.A, layer.B):
            factor.data = 0.3 * torch.randn(factor.shape, generator=generator)


@pytest.fixture
def adapted(model_dir):
    """A model with adapters on every matrix, and a frozen copy without."""
    model = load_model(str(model_dir))
    before = frozen_copy(model)
    add_lora(model, rank=2, alpha=6.0, targets=all_targets(model))
    randomize_factors(model)
    return model, before


def test_delta_matches_hand_computed():
    """alpha / rank = 4 / 2 = 2; A = [[1, 0], [2, 1]], B = [[1, 3], [0, 5]];
    A B = [[1, 3], [2, 11]], so W + 2 A B = [[12, 6], [4, 32]] for W = [[10, 0], [0, 10]].
    """
    weight = torch.tensor([[10.0, 0.0], [0.0, 10.0]])
    layer = LoRALinear(weight, rank=2, alpha=4.0, generator=torch.Generator().manual_seed(0))
    layer.A.data = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    layer.B.data = torch.tensor([[1.0, 3.0], [0.0, 5.0]])
    assert layer.delta().tolist() == [[2.0, 6.0], [4.0, 22.0]]
    assert layer(weight).tolist() == [[12.0, 6.0], [4.0, 32.0]]


@pytest.mark.parametrize(("shape", "by_head"), [((400, 30), False), ((8, 50, 30), True)])
def test_A_has_variance_1_over_inputs_and_B_is_0(shape, by_head):
    """400 inputs, also of W_O with 8 heads of 50: the standard deviation is 1 / 20."""
    layer = LoRALinear(torch.zeros(shape), 16, 1.0, torch.Generator().manual_seed(0), by_head)
    assert layer.A.std().item() == pytest.approx(0.05, rel=0.05) and not layer.B.any()


def test_new_adapters_keep_outputs_and_have_known_sizes(model_dir):
    """rank * (inputs + outputs) of each matrix: rank 2, width 16, two blocks.

    GPT-2: Q, K, V, O 2 * (16 + 16) = 64 each; in, out 2 * (16 + 64) = 160.
    Llama: Q, O 64; K, V 2 * (16 + 8) = 48; in, gate, out 2 * (16 + 24) = 80.
    """
    model = load_model(str(model_dir))
    sizes = 2 * 64 + 2 * 48 + 3 * 80 if model.cfg.gated_mlp else 4 * 64 + 2 * 160
    before = model(TOKENS)
    add_lora(model, rank=2, alpha=1.0, targets=2 * all_targets(model))
    assert torch.equal(model(TOKENS), before)
    trainable = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    assert sum(trainable.values()) == 2 * sizes
    assert all(name.endswith((".0.A", ".0.B")) for name in trainable)


def test_values_and_gradients_match_explicit_sum(adapted):
    """The weights of a frozen copy are replaced by W + alpha / rank * A B, computed with einsum."""
    model, before = adapted
    factors = {
        f"{name}.{p}": getattr(layer, p).detach().clone().requires_grad_()
        for name, layer in lora_layers(model).items()
        for p in "AB"
    }
    weights = dict(before.named_parameters())
    for name in lora_layers(model):
        kind = name.rsplit(".", 1)[1].lstrip("_")
        product = einops.einsum(factors[f"{name}.A"], factors[f"{name}.B"], BY_HAND[kind])
        weights[name] = weights[name] + 6.0 / 2 * product
    effective, merged = effective_weights(model), merged_copy(model)
    assert effective.keys() == weights.keys() == dict(merged.named_parameters()).keys()
    assert not any(parameter.requires_grad for parameter in merged.parameters())
    for name, weight in weights.items():
        torch.testing.assert_close(effective[name], weight.detach(), atol=1e-5, rtol=0)
    expected = functional_call(before, weights, (TOKENS,))
    logits = model(TOKENS)
    torch.testing.assert_close(merged(TOKENS), logits.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    logits.log_softmax(-1)[..., 3].sum().backward()
    expected.log_softmax(-1)[..., 3].sum().backward()
    for name, layer in lora_layers(model).items():
        for p in "AB":
            gradient, expected = getattr(layer, p).grad, factors[f"{name}.{p}"].grad
            assert expected.abs().max() > 0
            torch.testing.assert_close(gradient, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_adapters_off_is_bitwise_the_reference_after_training(adapted):
    model, before = adapted
    model(TOKENS).log_softmax(-1)[..., 3].sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    changed = model(TOKENS)
    with adapters_off(model):
        assert torch.equal(model(TOKENS), before(TOKENS))
        with pytest.raises(ArithmeticError), adapters_off(model):
            raise ArithmeticError
        assert not any(layer.enabled for layer in lora_layers(model).values())
    assert (changed - before(TOKENS)).abs().max() > 0.1
    assert torch.equal(model(TOKENS), changed)


def test_merged_lora_keeps_outputs_and_gradients(adapted):
    (model, _), expected = adapted, adapted[0](TOKENS)
    with merged_lora(model):
        layer = lora_layers(model)["blocks.0.attn.W_Q"]
        with torch.no_grad():
            assert model.blocks[0].attn.W_Q is layer.merged
            assert torch.equal(model(TOKENS), expected)
        model(TOKENS).sum().backward()
        assert layer.A.grad is not None
    assert all(layer.merged is None for layer in lora_layers(model).values())


def test_without_adapters_shares_weights_and_copies_do_not(adapted):
    model, before = adapted
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: None, is_permanent=True)
    view = without_adapters(model)
    assert torch.equal(view(TOKENS), before(TOKENS)) and not has_hooks(view)
    assert dict(view.named_parameters()).keys() == dict(before.named_parameters()).keys()
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(p.data_ptr() in shared and not p.requires_grad for p in view.parameters())
    changed, twin = model(TOKENS), copy.deepcopy(model)
    randomize_factors(model, seed=1)
    assert torch.equal(twin(TOKENS), changed) and not torch.equal(model(TOKENS), changed)


def test_impossible_argument_raises_and_changes_nothing(gpt2_dir):
    model = load_model(str(gpt2_dir))
    for rank, alpha, targets, message in (
        (0, 1.0, ("W_Q",), "lora_rank=0.*at least 1"),
        (2, 0.0, ("W_Q",), "lora_alpha=0.0.*greater than 0"),
        (2, 1.0, (), r"lora_targets=\(\)"),
        (2, 1.0, ("W_Q", "W_E"), "no matrix 'W_E'.*W_out"),
        (2, 1.0, ("W_gate",), "no matrix 'W_gate'"),
    ):
        with pytest.raises(ConfigError, match=message):
            add_lora(model, rank, alpha, targets)
        assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())
    with pytest.raises(ConfigError, match="no LoRA adapters"):
        without_adapters(model)
    add_lora(model, 2, 1.0)
    with pytest.raises(ConfigError, match="already"):
        add_lora(model, 2, 1.0)
