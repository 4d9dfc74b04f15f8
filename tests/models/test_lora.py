"""Tests the adapters: what they change, what they leave alone, and that they can be taken away."""

import copy

import einops
import pytest
import torch
from torch.func import functional_call

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import frozen_copy, load_model
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
BY_HAND = {
    "W_Q": "m r, h r d -> h m d",
    "W_K": "m r, h r d -> h m d",
    "W_V": "m r, h r d -> h m d",
    "W_O": "h d r, r m -> h d m",
    "W_in": "m r, r f -> m f",
    "W_gate": "m r, r f -> m f",
    "W_out": "f r, r m -> f m",
}


def targets_of(model):
    return LORA_TARGETS if model.cfg.gated_mlp else LORA_TARGETS[:-1]


def stir(model, seed=0):
    """Give A and B values of their own, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        for factor in (layer.A, layer.B):
            factor.data = 0.3 * torch.randn(factor.shape, generator=generator)


@pytest.fixture
def base(model_dir):
    return load_model(str(model_dir))


@pytest.fixture
def adapted(base):
    """A model with trained adapters on every matrix, and a frozen copy of what it was."""
    before = frozen_copy(base)
    add_lora(base, rank=2, alpha=6.0, targets=targets_of(base))
    stir(base)
    return base, before


def test_one_delta_worked_by_hand():
    """alpha / rank = 4 / 2 = 2; A = [[1, 0], [2, 1]], B = [[1, 3], [0, 5]];
    A B = [[1, 3], [2, 11]], so W + 2 A B = [[12, 6], [4, 32]] for W = [[10, 0], [0, 10]].
    """
    weight = torch.tensor([[10.0, 0.0], [0.0, 10.0]])
    layer = LoRALinear(weight, rank=2, alpha=4.0, generator=torch.Generator().manual_seed(0))
    layer.A.data = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    layer.B.data = torch.tensor([[1.0, 3.0], [0.0, 5.0]])
    assert layer.delta().tolist() == [[2.0, 6.0], [4.0, 22.0]]
    assert layer(weight).tolist() == [[12.0, 6.0], [4.0, 32.0]]
    assert weight.tolist() == [[10.0, 0.0], [0.0, 10.0]]


def test_A_starts_with_variance_one_over_the_inputs_and_B_at_zero():
    """400 inputs: standard deviation 1 / 20 = 0.05; of W_O, 8 heads x 50 inputs."""
    generator = torch.Generator().manual_seed(0)
    plain = LoRALinear(torch.zeros(400, 30), 16, 1.0, generator)
    by_head = LoRALinear(torch.zeros(8, 50, 30), 16, 1.0, generator, inputs_by_head=True)
    for layer in (plain, by_head):
        assert layer.A.std().item() == pytest.approx(0.05, rel=0.05)
        assert torch.count_nonzero(layer.B) == 0


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, ("W_Q", "W_V"), ("W_O",), ("W_in", "W_out")])
def test_new_adapters_change_no_output_bit(base, targets):
    before = base(TOKENS)
    add_lora(base, rank=3, alpha=8.0, targets=targets or targets_of(base))
    assert torch.equal(base(TOKENS), before)


def test_only_the_factors_can_be_trained_and_their_number_is_known(gpt2_dir, llama_dir):
    """rank * (inputs + outputs) per matrix, rank 2, two blocks.

    GPT-2, width 16: Q, K, V, O each 2 * (16 + 16) = 64; in and out 2 * (16 + 64) = 160;
    2 * (4 * 64 + 2 * 160) = 1152. Llama, 2 key-value heads of 4, width 24 inside: Q and O 64; K and
    V 2 * (16 + 8) = 48; in, gate and out 2 * (16 + 24) = 80; 2 * (2 * 64 + 2 * 48 + 3 * 80) = 928.
    """
    for directory, expected in ((gpt2_dir, 1152), (llama_dir, 928)):
        model = load_model(str(directory))
        add_lora(model, rank=2, alpha=1.0, targets=targets_of(model))
        trainable = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
        assert sum(trainable.values()) == expected
        assert all(name.endswith((".0.A", ".0.B")) for name in trainable)


def test_values_and_gradients_are_those_of_the_explicit_sum(adapted):
    """W + alpha / rank * A B, put into a copy of the frozen model as its weights, factor by factor
    with an einsum of its own.
    """
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
    expected = functional_call(before, weights, (TOKENS,))
    found = model(TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    found.log_softmax(-1)[..., 3].sum().backward()
    expected.log_softmax(-1)[..., 3].sum().backward()
    for name, layer in lora_layers(model).items():
        for p in "AB":
            gradient = factors[f"{name}.{p}"].grad
            assert gradient.abs().max() > 0
            torch.testing.assert_close(
                getattr(layer, p).grad, gradient, atol=1e-3, rtol=1e-3, msg=f"{name}.{p}"
            )


def test_a_training_step_moves_the_factors_and_nothing_else(adapted):
    model, before = adapted
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(TOKENS).log_softmax(-1)[..., 3].sum().backward()
    optimizer.step()
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    plain = dict(before.named_parameters())
    assert len(frozen) == len(plain)
    for name, parameter in frozen.items():
        own_name = name.replace(".parametrizations.", ".").removesuffix(".original")
        assert torch.equal(parameter, plain[own_name]), name
        assert parameter.grad is None


def test_with_the_adapters_off_the_model_is_the_reference_bit_for_bit(adapted):
    model, before = adapted
    changed = model(TOKENS)
    with adapters_off(model):
        assert torch.equal(model(TOKENS), before(TOKENS))
    assert (changed - before(TOKENS)).abs().max() > 0.1
    assert torch.equal(model(TOKENS), changed)


def test_adapters_come_back_on_after_an_error_and_stay_off_in_an_outer_block(adapted):
    model, _ = adapted
    with adapters_off(model):
        with pytest.raises(ArithmeticError), adapters_off(model):
            raise ArithmeticError
        assert not any(layer.enabled for layer in lora_layers(model).values())
    assert all(layer.enabled for layer in lora_layers(model).values())


def test_every_hook_fires_and_sees_the_changed_activations(adapted):
    model, before = adapted
    _, cache = model.run_with_cache(TOKENS)
    _, plain_cache = before.run_with_cache(TOKENS)
    assert cache.keys() == plain_cache.keys()
    for name in ("blocks.0.attn.hook_q", "blocks.1.attn.hook_v", "blocks.0.mlp.hook_pre"):
        assert (cache[name] - plain_cache[name]).abs().max() > 1e-2
    x = plain_cache["blocks.0.ln1.hook_normalized"] * model.blocks[0].ln1.w
    x = x + getattr(model.blocks[0].ln1, "b", 0.0)
    attn = model.blocks[0].attn
    q = torch.einsum("bsm,hmd->bshd", x, attn.W_Q.detach()) + attn.b_Q
    torch.testing.assert_close(cache["blocks.0.attn.hook_q"], q, atol=1e-4, rtol=0)


def test_a_hook_can_steer_a_model_with_adapters(adapted):
    model, _ = adapted
    hooks = [("blocks.0.hook_resid_post", lambda resid, hook: resid.flip(-1))]
    steered = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert (steered - model(TOKENS)).abs().max() > 0.1


def test_merging_changes_no_bit_and_unmerging_gives_every_weight_back(adapted):
    model, before = adapted
    with torch.no_grad():
        live = model(TOKENS)
        with merged_lora(model):
            assert all(layer.merged is not None for layer in lora_layers(model).values())
            assert torch.equal(model(TOKENS), live)
        assert all(layer.merged is None for layer in lora_layers(model).values())
        assert torch.equal(model(TOKENS), live)
        with adapters_off(model):
            assert torch.equal(model(TOKENS), before(TOKENS))


def test_merged_weights_are_used_without_gradients_and_the_factors_with(adapted):
    model, _ = adapted
    with merged_lora(model):
        layer = lora_layers(model)["blocks.0.attn.W_Q"]
        with torch.no_grad():
            assert model.blocks[0].attn.W_Q is layer.merged
        model(TOKENS).sum().backward()
        assert layer.A.grad is not None
    assert layer.merged is None


def test_the_view_without_adapters_is_the_reference_and_has_no_weights_of_its_own(adapted):
    model, before = adapted
    fired = []
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: fired.append(1), is_permanent=True)
    view = without_adapters(model)
    assert torch.equal(view(TOKENS), before(TOKENS)) and fired == []
    assert {n: p.shape for n, p in view.named_parameters()} == {
        n: p.shape for n, p in before.named_parameters()
    }
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in own for parameter in view.parameters())
    assert not any(p.requires_grad for p in view.parameters())
    changed = model(TOKENS)
    assert fired == [1] and (changed - view(TOKENS)).abs().max() > 0.1


def test_a_deep_copy_has_adapters_of_its_own(adapted):
    model, _ = adapted
    twin = copy.deepcopy(model)
    expected = model(TOKENS)
    assert torch.equal(twin(TOKENS), expected)
    stir(model, seed=1)
    assert torch.equal(twin(TOKENS), expected)
    without_adapters(twin)
    assert torch.equal(twin(TOKENS), expected)
    assert (model(TOKENS) - expected).abs().max() > 0.1


def test_effective_weights_have_the_plain_names_and_the_changed_values(adapted):
    model, before = adapted
    weights = effective_weights(model)
    assert weights.keys() == dict(before.named_parameters()).keys()
    found = functional_call(before, weights, (TOKENS,))
    torch.testing.assert_close(found, model(TOKENS), atol=1e-5, rtol=0)
    assert torch.equal(weights["embed.W_E"], before.embed.W_E)


def test_the_seed_decides_A_and_no_other_random_state_is_touched(gpt2_dir):
    def factor(seed):
        model = load_model(str(gpt2_dir))
        add_lora(model, 2, 1.0, seed=seed)
        return lora_layers(model)["blocks.1.attn.W_V"].A

    torch.manual_seed(4)
    state = torch.get_rng_state()
    assert torch.equal(factor(1), factor(1)) and not torch.equal(factor(1), factor(2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_adapters_take_the_dtype_of_the_weight(gpt2_dir, dtype):
    model = load_model(str(gpt2_dir)).to(dtype)
    add_lora(model, 2, 1.0)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(TOKENS[:1, :1]).dtype == dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, ("lora_rank=0", "1 to 16")),
        ({"rank": 17}, ("lora_rank=17", "1 to 16")),
        ({"alpha": 0.0}, ("lora_alpha=0.0", "greater than 0")),
        ({"targets": ()}, ("lora_targets=()", "nothing", "W_Q")),
        ({"targets": ("W_Q", "W_E")}, ("'W_E'", "W_out")),
        ({"targets": ("W_gate",)}, ("'W_gate'", "leave it out")),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(gpt2_dir, change, words):
    model = load_model(str(gpt2_dir))
    with pytest.raises(ConfigError) as caught:
        add_lora(model, **({"rank": 2, "alpha": 1.0} | change))
    assert all(word in str(caught.value) for word in words)
    assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())


def test_adapters_on_adapters_and_a_view_without_any_are_refused(gpt2_dir):
    model = load_model(str(gpt2_dir))
    with pytest.raises(ConfigError, match="no LoRA adapters"):
        without_adapters(model)
    add_lora(model, 2, 1.0)
    with pytest.raises(ConfigError, match="already"):
        add_lora(model, 2, 1.0)
