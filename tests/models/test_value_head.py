"""Tests of the value head and its three kinds: values, hooks, gradients, padding, the critic."""

from functools import partial

import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import (
    HookedTransformer,
    ModelConfig,
    TransformerWithCritic,
    TransformerWithValueHead,
    add_lora,
    has_hooks,
    load_model,
    lora_layers,
    make_policy,
    make_value_head,
)
from tests.tiny_models import randomize

VALUE_HOOK = "ln_final.hook_normalized"
HEAD_SITES = {"value_head.hook_in": 16, "value_head.hook_hidden": 64, "value_head.hook_value": 1}
TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])
PADDED = torch.tensor([[4, 9, 13, 7, 20, 5], [0, 0, 19, 6, 8, 10], [0, 0, 0, 0, 0, 11]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=0)
KINDS = ("shared", "detached", "separate")


def apply_by_hand(head, x):
    """Compute W2 relu(W1 x + b1) + b2."""
    hidden = (x @ head[0].weight.T + head[0].bias).clamp(min=0)
    return hidden @ head[2].weight[0] + head[2].bias[0]


def test_new_value_head_is_small_and_seeded():
    """Inputs of unit variance give values of order 0.01; a default last layer gives order 0.2."""
    state = torch.random.manual_seed(11).get_state()
    head, same, other = (make_value_head(16, seed) for seed in (5, 5, 0))
    assert torch.equal(torch.get_rng_state(), state)
    shapes = {name: tuple(x.shape) for name, x in head.state_dict().items()}
    layers = {"0.weight": (64, 16), "0.bias": (64,), "2.weight": (1, 64), "2.bias": (1,)}
    assert shapes == layers  # the names in checkpoints
    for layer in (0, 2):
        assert torch.equal(head[layer].weight, same[layer].weight)
        assert not torch.equal(head[layer].weight, other[layer].weight)
    values = head(torch.randn(1000, 16, generator=torch.Generator().manual_seed(0)))
    assert values.abs().max() < 0.05 and values.std() > 1e-4


@pytest.mark.slow
def test_from_pretrained_loads_a_name_and_adds_a_head():
    policy = TransformerWithValueHead.from_pretrained("reel-nano", seed=3)
    expected = TransformerWithValueHead(load_model("reel-nano"), seed=3).state_dict()
    assert all(torch.equal(expected[name], x) for name, x in policy.state_dict().items())
    critic = TransformerWithCritic.from_pretrained("reel-nano").critic
    assert torch.equal(critic.W_E, policy.base_model.W_E)
    with pytest.raises(LoadError, match="'no-such-model'"):
        TransformerWithValueHead.from_pretrained("no-such-model")


@pytest.mark.usefixtures("no_type_checks")
def test_policy_raises_on_a_name_a_wrong_kind_or_no_final_norm():
    sizes = {"n_layers": 1, "d_model": 8, "n_ctx": 4, "d_head": 8, "d_vocab": 5}
    without_norm = HookedTransformer(ModelConfig(**sizes))
    del without_norm.hook_dict["ln_final.hook_normalized"]
    for base_model in ("gpt2", without_norm):
        with pytest.raises(ConfigError, match=r"hook point 'ln_final.hook_normalized'.*pretrained"):
            TransformerWithValueHead(base_model)
    with pytest.raises(ConfigError, match="value_head 'none'.*shared, detached or separate"):
        make_policy(HookedTransformer(ModelConfig(**sizes)), "none")


def test_logits_and_values_match_hand_computed(policy):
    _, cache = policy.base_model.run_with_cache(TOKENS)
    logits, values = policy(TOKENS)
    assert_close(logits, policy.base_model(TOKENS))
    assert_close(values, apply_by_hand(policy.value_head, cache[VALUE_HOOK]))
    assert values.std() > 0.1
    for x, expected in zip(policy(TOKENS[:1]), (logits, values), strict=True):
        assert_close(x, expected[:1])
    double_first = lambda x, hook: torch.cat([2 * x[..., :1], x[..., 1:]], -1)
    with policy.base_model.hooks([(VALUE_HOOK, double_first)]):
        expected = apply_by_hand(policy.value_head, double_first(cache[VALUE_HOOK], None))
        assert_close(policy(TOKENS)[1], expected)


def test_value_head_can_be_any_module(gpt2_dir):
    head = nn.Linear(16, 1)
    policy = TransformerWithValueHead(load_model(str(gpt2_dir)), head)
    (_, values), cache = policy.run_with_cache(TOKENS)
    assert policy.value_head is head
    assert not any(name.startswith("value_head.") for name in cache)
    assert_close(values, head(cache[VALUE_HOOK])[..., 0])
    for kind in (TransformerWithValueHead, TransformerWithCritic):
        with pytest.raises(RuntimeError, match="is invalid for input of size"):
            kind(policy.base_model, nn.Linear(16, 2))(TOKENS)


def test_run_with_cache_adds_the_head_and_filters_names(policy):
    outputs, cache = policy.run_with_cache(TOKENS)
    for x, expected in zip(outputs, policy(TOKENS), strict=True):
        assert_close(x, expected)
    _, base_cache = policy.base_model.run_with_cache(TOKENS)
    assert cache.keys() - base_cache.keys() == HEAD_SITES.keys()
    for name, width in HEAD_SITES.items():
        assert cache[name].shape == (*TOKENS.shape, width) and not cache[name].requires_grad
    assert torch.equal(cache["value_head.hook_in"], cache[VALUE_HOOK])
    assert torch.equal(cache["value_head.hook_value"][..., 0], outputs[1])
    assert cache["value_head.hook_hidden"].min() == 0  # after the ReLU
    assert_close(cache["resid_post", 0], base_cache["resid_post", 0])
    names = ["blocks.0.hook_resid_post", "value_head.hook_value"]
    for names_filter in (names, names.__contains__):
        assert policy.run_with_cache(TOKENS, names_filter=names_filter)[1].keys() == set(names)
    mask = torch.tensor([[True] * 6, [False] * 4 + [True] * 2])
    _, cache = policy.run_with_cache(TOKENS, mask, names_filter=names[1])
    assert_close(cache[names[1]][1, :2, 0], policy(TOKENS[1:, 4:])[1][0])


def test_contexts_of_policy_and_model_remove_only_their_hooks(policy):
    for first, second in ((policy, policy.base_model), (policy.base_model, policy)):
        outer, inner = [], []
        with first.hooks([("hook_embed", lambda x, hook, to=outer: to.append(1))]):
            with second.hooks([("hook_embed", lambda x, hook, to=inner: to.append(1))]):
                policy(TOKENS)
            policy(TOKENS)
        assert not has_hooks(policy) and (len(outer), len(inner)) == (2, 1)
    with pytest.raises(ZeroDivisionError), policy.hooks([("hook_embed", lambda x, hook: 1 / 0)]):
        policy(TOKENS)
    assert not has_hooks(policy)


@pytest.fixture
def make(model_dir):
    def build(kind):
        policy = make_policy(load_model(str(model_dir)), kind)
        randomize(policy.value_head, seed=3)
        return policy

    return build


def gradient_norm(module):
    return sum(p.grad.abs().sum().item() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_value_loss_reaches_trunk_or_critic(make, kind):
    policy = make(kind)
    (policy(TOKENS)[1] - 1).square().mean().backward()
    assert min(p.grad.abs().max() for p in policy.value_head.parameters()) > 0
    assert hasattr(policy, "critic") == (kind == "separate")
    trunk = policy.critic if kind == "separate" else policy.base_model
    reached = [trunk.embed, trunk.blocks[0].attn, trunk.blocks[1].mlp]
    assert [gradient_norm(part) > 0 for part in reached] == 3 * [kind != "detached"]
    assert gradient_norm(trunk.unembed) == 0 and trunk.ln_final.w.grad is None
    assert kind == "shared" or gradient_norm(policy.base_model) == 0


def test_policy_loss_reaches_only_the_trunk_equally(make):
    gradients, outputs = [], []
    for kind in KINDS:
        policy = make(kind)
        outputs.append(policy(TOKENS))
        outputs[-1][0].log_softmax(-1)[..., 3].sum().backward()
        assert gradient_norm(policy.value_head) == 0
        assert kind != "separate" or gradient_norm(policy.critic) == 0
        gradients.append(policy.base_model.blocks[0].attn.W_Q.grad)
        torch.testing.assert_close(gradients[-1], gradients[0], atol=1e-6, rtol=1e-5)
        assert_close(outputs[-1], outputs[0])  # the kinds start equal
    assert gradients[0].abs().max() > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_match_rows_alone(make, kind):
    """No step of the backward pass is nan, as the softmax of masked padding would be."""
    policy, results = make(kind), []
    rows = [(PADDED, MASK), (PADDED.masked_fill(~MASK, 17), MASK)]
    alone = [(PADDED[i : i + 1, real], None) for i, real in enumerate(MASK)]
    for inputs in ([rows[0]], [rows[1]], alone):
        policy.zero_grad()
        outputs = []
        with torch.autograd.detect_anomaly():
            for tokens, mask in inputs:
                real = torch.ones_like(tokens).bool() if mask is None else mask
                logits, values = (x[real] for x in policy(tokens, mask))
                (logits.log_softmax(-1)[:, 0].sum() + values.sum()).backward()
                outputs += [logits, values[:, None]]
        gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        results.append((torch.cat(outputs[::2]), torch.cat(outputs[1::2]), torch.cat(gradients)))
    for padded in results[:2]:
        torch.testing.assert_close(padded, results[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_cast_and_move_reach_configuration_and_values(make, kind):
    policy = make(kind)
    models = [policy.base_model, *([policy.critic] if kind == "separate" else [])]
    outputs = policy(TOKENS)
    torch.nn.ModuleDict({"policy": policy}).double()
    assert {p.dtype for p in policy.parameters()} == {torch.float64}
    assert {model.cfg.dtype for model in models} == {torch.float64}
    for x, expected in zip(policy(TOKENS), outputs, strict=True):
        assert_close(x, expected.double(), atol=1e-4)
    assert policy.to("meta") is policy and policy.device.type == "meta"
    assert {str(model.cfg.device) for model in models} == {"meta"}
    assert all(f.is_meta for model in models for f, _ in model.rotary.values())


def test_policy_and_critic_change_separately(make):
    policy = make("separate")
    weights = {p.data_ptr() for p in policy.base_model.parameters()}
    critics = [p for p in policy.critic.parameters() if p.requires_grad]
    assert critics and not any(p.data_ptr() in weights for p in critics)
    logits, values = policy(TOKENS)
    policy.critic.blocks[0].mlp.W_in.data.mul_(1.5)
    _, cache = policy.critic.run_with_cache(TOKENS)
    new_logits, new_values = policy(TOKENS)
    assert torch.equal(new_logits, logits) and (new_values - values).abs().max() > 1e-2
    assert_close(new_values, policy.value_head(cache["ln_final.hook_normalized"])[..., 0])
    policy.base_model.embed.W_E.data.mul_(1.5)
    assert torch.equal(policy(TOKENS)[1], new_values)


def test_critic_shares_frozen_weights_but_not_hooks(model_dir):
    model, fired, name = load_model(str(model_dir)), [], "blocks.0.hook_resid_post"
    model.add_hook(name, lambda x, hook: fired.append("policy"), is_permanent=True)
    add_lora(model, 2, 1.0)
    policy = make_policy(model, "separate")
    policy.critic.add_hook(name, lambda x, hook: fired.append("critic"))
    shared = {p.data_ptr() for p in policy.base_model.parameters() if not p.requires_grad}
    frozen = [p for p in policy.critic.parameters() if not p.requires_grad]
    assert frozen and all(p.data_ptr() in shared for p in frozen)
    policy(TOKENS)[1].sum().backward()
    assert sorted(fired) == ["critic", "policy"]
    assert all(layer.B.grad is None for layer in lora_layers(policy.base_model).values())
    assert all(layer.B.grad is not None for layer in lora_layers(policy.critic).values())
