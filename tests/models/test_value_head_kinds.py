"""Tests of the kinds of value head: what each loss reaches, and the critic."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import generated_values
from rlhf_lab.models import add_lora, load_model, lora_layers, make_policy, make_value_head
from rlhf_lab.sampling import SamplingSpec, sample

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])
PADDED = torch.tensor([[4, 9, 13, 7, 20, 5], [0, 0, 19, 6, 8, 10]])
PADDED_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()
KINDS = ("shared", "detached", "separate")


@pytest.fixture
def make(model_dir, randomize_weights):
    def build(kind):
        policy = make_policy(load_model(str(model_dir)), kind)
        randomize_weights(policy.value_head, seed=3)
        return policy

    return build


def gradient_norm(module):
    return sum(p.grad.abs().sum().item() for p in module.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_value_loss_reaches_trunk_or_critic(make, kind):
    policy = make(kind)
    _, values = policy(TOKENS)
    (values - 1).square().mean().backward()
    assert gradient_norm(policy.value_head) > 0
    assert (gradient_norm(policy.base_model) > 0) == (kind == "shared")
    assert hasattr(policy, "critic") == (kind == "separate")
    if kind == "separate":
        assert gradient_norm(policy.critic.blocks[0]) > 0
        assert gradient_norm(policy.critic.unembed) == 0


@pytest.mark.slow
def test_policy_loss_reaches_only_the_trunk_equally(make):
    gradients = []
    for kind in KINDS:
        policy = make(kind)
        policy(TOKENS)[0].log_softmax(-1)[..., 3].sum().backward()
        assert gradient_norm(policy.value_head) == 0
        assert kind != "separate" or gradient_norm(policy.critic) == 0
        gradients.append(policy.base_model.blocks[0].attn.W_Q.grad)
        torch.testing.assert_close(gradients[-1], gradients[0], atol=1e-6, rtol=1e-5)
    assert gradients[0].abs().max() > 0


@pytest.mark.slow
def test_all_kinds_start_with_equal_outputs(make):
    shared, *others = (make(kind)(TOKENS) for kind in KINDS)
    for other in others:
        torch.testing.assert_close(other, shared, atol=1e-5, rtol=0)


def test_policy_and_critic_share_no_weight_and_change_separately(make):
    policy = make("separate")
    shared = {p.data_ptr() for p in policy.base_model.parameters()}
    critics = [p for p in policy.critic.parameters() if p.requires_grad]
    assert critics and not any(p.data_ptr() in shared for p in critics)
    logits, values = policy(TOKENS)
    policy.critic.embed.W_E.data += 0.5 * torch.randn_like(policy.critic.embed.W_E)
    changed_logits, changed_values = policy(TOKENS)
    assert torch.equal(changed_logits, logits)
    assert (changed_values - values).abs().max() > 1e-2
    policy.base_model.embed.W_E.data.mul_(1.5)
    assert torch.equal(policy(TOKENS)[1], changed_values)


def test_value_head_reads_the_residual_of_the_critic(make):
    policy = make("separate")
    policy.critic.blocks[0].mlp.W_in.data.mul_(1.5)
    _, cache = policy.critic.run_with_cache(TOKENS)
    expected = policy.value_head(cache["ln_final.hook_normalized"])[..., 0]
    torch.testing.assert_close(policy(TOKENS)[1], expected, atol=1e-5, rtol=0)


def test_hooks_fire_in_policy_and_critic_and_are_not_copied(model_dir):
    model, calls = load_model(str(model_dir)), []
    name = "blocks.0.hook_resid_post"
    model.add_hook(name, lambda x, hook: calls.append("policy"), is_permanent=True)
    policy = make_policy(model, "separate")
    policy.critic.add_hook(name, lambda x, hook: calls.append("critic"))
    policy(TOKENS)
    assert sorted(calls) == ["critic", "policy"]
    assert policy.critic.hook_dict["ln_final.hook_normalized"].fwd_hooks == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_cached_values_match_full_sequences(make, kind):
    """The critic is changed, so its keys and values differ from the policy's."""
    policy = make(kind)
    if kind == "separate":
        policy.critic.blocks[0].attn.W_Q.data.mul_(1.5)
        policy.critic.blocks[1].mlp.W_in.data.mul_(0.5)
    padded, alone = policy(PADDED, PADDED_MASK), policy(PADDED[1:, 2:])
    for x, expected in zip(padded, alone, strict=True):
        torch.testing.assert_close(x[1:, 2:], expected, atol=1e-5, rtol=0)
    prompts = [[4, 9, 13], [7, 8], [4, 9, 13]]
    samples = sample(policy, prompts, SamplingSpec(6), torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, values = policy(samples.tokens, samples.attention_mask)
    expected = generated_values(values, samples.prefix_len)
    torch.testing.assert_close(samples.values, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_cast_and_move_reach_the_critic(make):
    policy = make("separate")
    assert policy.double().critic.cfg.dtype == torch.float64
    assert policy(TOKENS)[1].dtype == torch.float64
    policy.to("meta")
    assert str(policy.critic.cfg.device) == "meta"


def test_critic_with_adapters_shares_only_frozen_weights(model_dir):
    model = load_model(str(model_dir))
    add_lora(model, 2, 1.0)
    policy = make_policy(model, "separate")
    shared = {p.data_ptr() for p in policy.base_model.parameters() if not p.requires_grad}
    frozen = [p for p in policy.critic.parameters() if not p.requires_grad]
    assert frozen and all(p.data_ptr() in shared for p in frozen)
    policy(TOKENS)[1].sum().backward()
    assert all(layer.B.grad is None for layer in lora_layers(policy.base_model).values())
    assert all(layer.B.grad is not None for layer in lora_layers(policy.critic).values())


def test_kinds_share_the_seeded_head_and_others_raise(gpt2_dir):
    for kind in KINDS:
        policy = make_policy(load_model(str(gpt2_dir)), kind, seed=5)
        assert torch.equal(policy.value_head[2].weight, make_value_head(16, seed=5)[2].weight)
    with pytest.raises(ConfigError, match=r"(?s)value_head 'none'.*shared, detached or separate"):
        make_policy(load_model(str(gpt2_dir)), "none")
