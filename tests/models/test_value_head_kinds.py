"""Tests where the value loss reaches in each kind of value head, and the critic's cache."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import generated_values
from rlhf_lab.models import add_lora, load_model, lora_layers, make_policy, make_value_head
from rlhf_lab.models.transformer_lens import empty_cache
from rlhf_lab.sampling import SamplingSpec, sample

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])
PADDED = torch.tensor([[4, 9, 13, 7, 20, 5], [0, 0, 19, 6, 8, 10]])
PADDED_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()


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
@pytest.mark.parametrize(
    ("kind", "trunk", "critic"),
    [("shared", True, None), ("detached", False, None), ("separate", False, True)],
)
def test_where_the_value_loss_reaches(make, kind, trunk, critic):
    policy = make(kind)
    _, values = policy(TOKENS)
    (values - 1).square().mean().backward()
    assert gradient_norm(policy.value_head) > 0
    assert (gradient_norm(policy.base_model) > 0) == trunk
    assert hasattr(policy, "critic") == (critic is not None)
    if critic:
        assert gradient_norm(policy.critic.blocks[0]) > 0
        assert gradient_norm(policy.critic.unembed) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "detached", "separate"])
def test_the_policy_loss_reaches_the_trunk_and_never_head_or_critic(make, kind):
    policy = make(kind)
    policy(TOKENS)[0].log_softmax(-1)[..., 3].sum().backward()
    assert gradient_norm(policy.base_model) > 0
    assert gradient_norm(policy.value_head) == 0
    assert kind != "separate" or gradient_norm(policy.critic) == 0


@pytest.mark.slow
def test_the_policy_gradient_does_not_depend_on_the_kind(make):
    gradients = []
    for kind in ("shared", "detached", "separate"):
        policy = make(kind)
        policy(TOKENS)[0].log_softmax(-1)[..., 3].sum().backward()
        gradients.append(policy.base_model.blocks[0].attn.W_Q.grad)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients[2], gradients[0], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_all_kinds_start_with_the_same_numbers(make):
    shared, detached, separate = (make(kind)(TOKENS) for kind in ("shared", "detached", "separate"))
    for other in (detached, separate):
        assert torch.equal(other[0], shared[0])
        torch.testing.assert_close(other[1], shared[1], atol=1e-5, rtol=0)


def test_policy_and_critic_share_no_weight_and_change_apart(make):
    policy = make("separate")
    own = {p.data_ptr() for p in policy.base_model.parameters()}
    critics = [p for p in policy.critic.parameters() if p.requires_grad]
    assert critics and not any(p.data_ptr() in own for p in critics)
    logits, values = policy(TOKENS)
    policy.critic.embed.W_E.data += 0.5 * torch.randn_like(policy.critic.embed.W_E)
    changed_logits, changed_values = policy(TOKENS)
    assert torch.equal(changed_logits, logits)
    assert (changed_values - values).abs().max() > 1e-2
    policy.base_model.embed.W_E.data.mul_(1.5)
    assert torch.equal(policy(TOKENS)[1], changed_values)


def test_the_critic_reads_its_own_normalized_residual(make):
    policy = make("separate")
    policy.critic.blocks[0].mlp.W_in.data.mul_(1.5)
    _, cache = policy.critic.run_with_cache(TOKENS)
    expected = policy.value_head(cache["ln_final.hook_normalized"])[..., 0]
    torch.testing.assert_close(policy(TOKENS)[1], expected, atol=1e-5, rtol=0)


def test_hooks_of_policy_and_critic_fire_and_do_not_travel(model_dir):
    model, fired = load_model(str(model_dir)), []
    model.add_hook(
        "blocks.0.hook_resid_post", lambda x, hook: fired.append("policy"), is_permanent=True
    )
    policy = make_policy(model, "separate")
    policy.critic.add_hook("blocks.0.hook_resid_post", lambda x, hook: fired.append("critic"))
    policy(TOKENS)
    assert sorted(fired) == ["critic", "policy"]
    assert policy.critic.hook_dict["ln_final.hook_normalized"].fwd_hooks == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "detached", "separate"])
def test_left_padded_rows_give_what_the_rows_give_alone(make, kind):
    policy = make(kind)
    logits, values = policy(PADDED, PADDED_MASK)
    alone_logits, alone_values = policy(PADDED[1:, 2:])
    torch.testing.assert_close(logits[1:, 2:], alone_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(values[1:, 2:], alone_values, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "detached", "separate"])
def test_values_noted_while_sampling_are_those_of_the_finished_sequences(make, kind):
    """The critic has been changed, so that its keys and values cannot pass for the policy's."""
    policy = make(kind)
    if kind == "separate":
        policy.critic.blocks[0].attn.W_Q.data.mul_(1.5)
        policy.critic.blocks[1].mlp.W_in.data.mul_(0.5)
    prompts = [[4, 9, 13], [7, 8], [4, 9, 13]]
    samples = sample(policy, prompts, SamplingSpec(6), torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, values = policy(samples.tokens, samples.attention_mask)
    expected = generated_values(values, samples.prefix_len)
    torch.testing.assert_close(samples.values, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_casting_and_moving_reach_the_critic(make):
    policy = make("separate")
    assert policy.double().critic.cfg.dtype == torch.float64
    assert policy(TOKENS)[1].dtype == torch.float64
    policy.to("meta")
    assert str(policy.critic.cfg.device) == "meta"


def test_a_critic_on_adapters_shares_the_frozen_weights_and_has_adapters_of_its_own(model_dir):
    model = load_model(str(model_dir))
    add_lora(model, 2, 1.0)
    policy = make_policy(model, "separate")
    own = {p.data_ptr() for p in policy.base_model.parameters() if not p.requires_grad}
    frozen = [p for p in policy.critic.parameters() if not p.requires_grad]
    assert frozen and all(p.data_ptr() in own for p in frozen)
    policy(TOKENS)[1].sum().backward()
    assert all(layer.B.grad is None for layer in lora_layers(policy.base_model).values())
    assert all(layer.B.grad is not None for layer in lora_layers(policy.critic).values())


def test_another_kind_is_refused(model_dir):
    with pytest.raises(ConfigError, match="value_head='none' is unknown; choose shared, detached"):
        make_policy(load_model(str(model_dir)), "none")


@pytest.mark.parametrize("kind", ["shared", "detached", "separate"])
def test_the_seed_makes_the_same_fresh_head_in_every_kind(gpt2_dir, kind):
    policy = make_policy(load_model(str(gpt2_dir)), kind, seed=5)
    assert torch.equal(policy.value_head[2].weight, make_value_head(16, seed=5)[2].weight)


def test_a_cache_of_the_policy_alone_is_refused_by_a_critic(make):
    policy = make("separate")
    cache = empty_cache(policy.base_model.cfg, "cpu", 2)
    with pytest.raises(ValueError, match="2 layers .* of 2 each; make it with init_cache"):
        policy(TOKENS, torch.ones_like(TOKENS).bool(), cache)
