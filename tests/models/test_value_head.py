"""Tests of the value head: its start, the residual it reads, and hooks on it."""

import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import (
    HookedTransformer,
    ModelConfig,
    TransformerWithCritic,
    TransformerWithValueHead,
    has_hooks,
    load_model,
    make_value_head,
)

VALUE_HOOK = "ln_final.hook_normalized"
HEAD_SITES = {"value_head.hook_in": 16, "value_head.hook_hidden": 64, "value_head.hook_value": 1}
TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])


def apply_by_hand(head, x):
    """Compute W2 relu(W1 x + b1) + b2."""
    hidden = (x @ head[0].weight.T + head[0].bias).clamp(min=0)
    return hidden @ head[2].weight[0] + head[2].bias[0]


def assert_close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


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
def test_policy_raises_on_a_name_or_without_final_norm():
    sizes = {"n_layers": 1, "d_model": 8, "n_ctx": 4, "d_head": 8, "d_vocab": 5}
    without_norm = HookedTransformer(ModelConfig(**sizes))
    del without_norm.hook_dict["ln_final.hook_normalized"]
    for base_model in ("gpt2", without_norm):
        with pytest.raises(ConfigError, match=r"hook point 'ln_final.hook_normalized'.*pretrained"):
            TransformerWithValueHead(base_model)


def test_logits_and_values_match_hand_computed(policy):
    _, cache = policy.base_model.run_with_cache(TOKENS)
    logits, values = policy(TOKENS)
    assert_close(logits, policy.base_model(TOKENS))
    assert_close(values, apply_by_hand(policy.value_head, cache[VALUE_HOOK]))
    assert values.std() > 0.1
    for x, expected in zip(policy(TOKENS[:1]), (logits, values), strict=True):
        assert_close(x, expected[:1])


def test_value_head_can_be_any_module(gpt2_dir):
    head = nn.Linear(16, 1)
    policy = TransformerWithValueHead(load_model(str(gpt2_dir)), head)
    (_, values), cache = policy.run_with_cache(TOKENS)
    assert policy.value_head is head
    assert not any(name.startswith("value_head.") for name in cache)
    assert_close(values, head(cache[VALUE_HOOK])[..., 0])


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


def test_value_head_reads_the_replaced_residual(policy):
    double_first = lambda x, hook: torch.cat([2 * x[..., :1], x[..., 1:]], -1)
    _, cache = policy.base_model.run_with_cache(TOKENS)
    policy.base_model.add_hook(VALUE_HOOK, double_first)
    expected = apply_by_hand(policy.value_head, double_first(cache[VALUE_HOOK], None))
    assert_close(policy(TOKENS)[1], expected)


def test_hooks_last_until_their_context_ends(policy):
    name, value_name, fired = "blocks.0.hook_resid_post", "value_head.hook_value", []
    _, values = policy(TOKENS)
    policy.base_model.add_hook(name, lambda x, hook: fired.append(1), is_permanent=True)
    policy.hook_dict[value_name].add_hook(lambda x, hook: 2 * x)
    for triple in (True, False, False):
        hooks = [(value_name, lambda x, hook: 1.5 * x), (name, lambda x, hook: fired.append(2))]
        with policy.hooks(hooks if triple else []):
            assert_close(policy(TOKENS)[1], (3 if triple else 2) * values, atol=1e-4)
    assert fired == [1, 2, 1, 1]
    unknown = policy.hooks([("value_head.hook_out", lambda x, hook: None)])
    with pytest.raises(KeyError, match="value_head.hook_out"), unknown:
        pass


def test_contexts_of_policy_and_model_remove_only_their_hooks(policy):
    for first, second in ((policy, policy.base_model), (policy.base_model, policy)):
        outer, inner = [], []
        with first.hooks([("hook_embed", lambda x, hook, to=outer: to.append(1))]):
            with second.hooks([("hook_embed", lambda x, hook, to=inner: to.append(1))]):
                policy(TOKENS)
            policy(TOKENS)
        assert not has_hooks(policy) and (len(outer), len(inner)) == (2, 1)


def test_no_hook_is_left_after_a_failing_forward_pass(policy):
    def fail(x, hook):
        raise ArithmeticError

    with pytest.raises(ArithmeticError), policy.hooks([("ln_final.hook_scale", fail)]):
        policy(TOKENS)
    assert not has_hooks(policy)
