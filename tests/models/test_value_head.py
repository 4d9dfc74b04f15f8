"""Tests the value head: what feeds it, where its gradient goes, and what padding does to it."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import (
    TransformerWithCritic,
    TransformerWithValueHead,
    load_model,
    make_value_head,
)
from rlhf_lab.models.hooked_model import make_model
from rlhf_lab.sampling import SamplingSpec, sample

VALUE_HOOK = "ln_final.hook_normalized"
TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])
PADDED = torch.tensor([[4, 9, 13, 7, 20, 5], [0, 0, 19, 6, 8, 10], [0, 0, 0, 0, 0, 11]])
PADDED_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()


def apply_by_hand(head, normalized):
    """W2 relu(W1 x + b1) + b2, one state at a time."""
    values = torch.empty(normalized.shape[:2])
    for row in range(normalized.shape[0]):
        for position in range(normalized.shape[1]):
            hidden = head[0].weight @ normalized[row, position] + head[0].bias
            hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
            values[row, position] = (head[2].weight[0] * hidden).sum() + head[2].bias[0]
    return values


def test_the_head_is_two_linear_layers_with_a_relu_between():
    head = make_value_head(16)
    assert [type(head[i]) for i in range(3)] == [nn.Linear, nn.ReLU, nn.Linear]
    assert (head[0].in_features, head[0].out_features) == (16, 64)
    assert (head[2].in_features, head[2].out_features) == (64, 1)
    assert head[0].bias is not None and head[2].bias is not None


@pytest.mark.slow
def test_from_pretrained_loads_a_name_and_adds_a_fresh_head():
    policy = TransformerWithValueHead.from_pretrained("reel-nano", seed=3)
    by_hand = TransformerWithValueHead(load_model("reel-nano"), seed=3)
    theirs = by_hand.state_dict()
    assert all(torch.equal(theirs[name], weight) for name, weight in policy.state_dict().items())
    critic = TransformerWithCritic.from_pretrained("reel-nano")
    assert isinstance(critic, TransformerWithCritic)
    assert torch.equal(critic.critic.W_E, policy.base_model.W_E)
    with pytest.raises(LoadError, match="'no-such-model'"):
        TransformerWithValueHead.from_pretrained("no-such-model")


@pytest.mark.usefixtures("no_type_checks")
def test_a_name_in_place_of_a_model_is_answered():
    sentence = r"base_model='gpt2' is not a model .* by its name with .*\.from_pretrained\."
    with pytest.raises(ConfigError, match=sentence):
        TransformerWithValueHead("gpt2")


def test_first_values_are_small_but_not_all_alike():
    """Inputs of unit variance give values of order 1e-2; a default last layer gives order 0.2."""
    x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    values = make_value_head(16)(x)
    assert values.abs().max() < 0.05
    assert values.std() > 1e-4


def test_a_model_without_a_final_norm_is_refused_in_a_sentence():
    sizes = {"n_layers": 1, "d_model": 8, "n_ctx": 4, "d_head": 8, "d_vocab": 5, "act_fn": "relu"}
    model = make_model(**sizes, normalization_type=None)
    with pytest.raises(ConfigError, match=r"hook point 'ln_final.hook_normalized'"):
        TransformerWithValueHead(model)


def test_the_head_is_seeded():
    one, same, other = make_value_head(16, seed=5), make_value_head(16, seed=5), make_value_head(16)
    for layer in (0, 2):
        assert torch.equal(one[layer].weight, same[layer].weight)
        assert not torch.equal(one[layer].weight, other[layer].weight)


def test_the_policy_hands_its_seed_to_the_head(gpt2_dir):
    policy = TransformerWithValueHead(load_model(str(gpt2_dir)), seed=5)
    assert torch.equal(policy.value_head[0].weight, make_value_head(16, seed=5)[0].weight)


def test_making_a_head_leaves_the_global_random_state_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    make_value_head(16, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_head_does_not_depend_on_the_global_random_state():
    torch.manual_seed(1)
    one = make_value_head(16, seed=5)
    torch.manual_seed(2)
    assert torch.equal(one[0].weight, make_value_head(16, seed=5)[0].weight)


@pytest.mark.parametrize("rows", [1, 2])
def test_logits_and_values_have_one_entry_per_position(policy, rows):
    logits, values = policy(TOKENS[:rows])
    assert logits.shape == (rows, 6, policy.base_model.cfg.d_vocab)
    assert values.shape == (rows, 6)


def test_the_head_reads_the_final_normalized_residual(policy):
    _, cache = policy.base_model.run_with_cache(TOKENS)
    _, values = policy(TOKENS)
    expected = apply_by_hand(policy.value_head, cache[VALUE_HOOK])
    assert expected.std() > 0.1
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def test_logits_are_those_of_the_base_model(policy):
    logits, _ = policy(TOKENS)
    torch.testing.assert_close(logits, policy.base_model(TOKENS), atol=1e-5, rtol=0)


def test_a_head_of_ones_own_is_used(gpt2_dir):
    head = nn.Linear(16, 1)
    policy = TransformerWithValueHead(load_model(str(gpt2_dir)), value_head=head)
    _, cache = policy.base_model.run_with_cache(TOKENS)
    expected = (cache[VALUE_HOOK] * head.weight[0]).sum(-1) + head.bias[0]
    torch.testing.assert_close(policy(TOKENS)[1], expected, atol=1e-5, rtol=0)


def test_a_parameterless_head_of_ones_own_is_not_replaced(gpt2_dir):
    """An empty container is falsy, and still a module that somebody handed in."""

    class FirstEntry(nn.ModuleList):
        def forward(self, x):
            return x[..., :1]

    policy = TransformerWithValueHead(load_model(str(gpt2_dir)), value_head=FirstEntry())
    assert isinstance(policy.value_head, FirstEntry)


def test_the_gradient_of_the_value_reaches_the_trunk_and_never_the_unembedding(policy):
    _, values = policy(TOKENS)
    values.sum().backward()
    model = policy.base_model
    for parameter in (model.unembed.W_U, model.unembed.b_U, model.ln_final.w):
        assert parameter.grad is None or torch.count_nonzero(parameter.grad) == 0
    for parameter in (
        model.embed.W_E,
        model.blocks[0].attn.W_Q,
        model.blocks[1].mlp.W_out,
        policy.value_head[0].weight,
        policy.value_head[2].bias,
    ):
        assert parameter.grad.abs().max() > 0


def test_the_gradient_of_the_logits_does_not_reach_the_head(policy):
    logits, _ = policy(TOKENS)
    logits.pow(2).sum().backward()
    assert all(parameter.grad is None for parameter in policy.value_head.parameters())


def test_hooks_of_the_user_fire_and_are_still_there_after(policy):
    fired = []
    policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: fired.append(hook.name))
    policy.base_model.add_hook(
        "blocks.1.hook_resid_post", lambda x, hook: fired.append(hook.name), is_permanent=True
    )
    policy(TOKENS)
    policy(TOKENS)
    assert fired == ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"] * 2


def test_hooks_of_a_surrounding_context_fire_and_end_with_it(policy):
    fired = []
    hooks = [("blocks.0.hook_resid_post", lambda x, hook: fired.append(1))]
    with policy.base_model.hooks(fwd_hooks=hooks):
        policy(TOKENS)
        policy(TOKENS)
    policy(TOKENS)
    assert len(fired) == 2


def test_the_value_hook_is_gone_after_the_forward_pass(policy):
    policy(TOKENS)
    assert policy.base_model.hook_dict[VALUE_HOOK].fwd_hooks == []


def test_the_value_hook_is_gone_after_a_forward_pass_that_failed(policy):
    def fail(x, hook):
        raise ArithmeticError("on purpose")

    with (
        pytest.raises(ArithmeticError),
        policy.base_model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", fail)]),
    ):
        policy(TOKENS)
    assert policy.base_model.hook_dict[VALUE_HOOK].fwd_hooks == []
    assert policy(TOKENS)[1].shape == (2, 6)


def test_the_head_sees_what_a_hook_of_the_user_wrote_to_its_input(policy):
    """Doubling the first entry of the input: the head has to see the doubled one."""

    def double_first(x, hook):
        return torch.cat([2 * x[..., :1], x[..., 1:]], -1)

    _, cache = policy.base_model.run_with_cache(TOKENS)
    _, plain_values = policy(TOKENS)
    policy.base_model.add_hook(VALUE_HOOK, double_first)
    _, values = policy(TOKENS)
    expected = apply_by_hand(policy.value_head, double_first(cache[VALUE_HOOK], None))
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert (values - plain_values).abs().max() > 1e-2


def test_the_head_follows_an_intervention_in_the_trunk(policy):
    plain_values = policy(TOKENS)[1]
    policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x.flip(-1))
    assert (policy(TOKENS)[1] - plain_values).abs().max() > 1e-2


@pytest.mark.slow
def test_casting_reaches_the_configuration_and_the_numbers(policy):
    expected = policy(TOKENS)
    assert policy.to(torch.float64) is policy
    assert policy.base_model.cfg.dtype == torch.float64
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float64}
    for found, single in zip(policy(TOKENS), expected, strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), single, atol=1e-4, rtol=0)


def test_moving_reaches_the_configuration(policy):
    policy.to("meta")
    assert policy.device.type == "meta"
    assert str(policy.base_model.cfg.device) == "meta"


def test_moving_a_module_that_holds_the_policy_reaches_the_configuration(policy):
    nn.ModuleDict({"policy": policy}).double()
    assert policy.base_model.cfg.dtype == torch.float64


def test_the_head_takes_the_dtype_of_the_model(gpt2_dir):
    policy = TransformerWithValueHead(load_model(str(gpt2_dir), dtype=torch.float64))
    assert policy.value_head[0].weight.dtype == torch.float64


def test_left_padded_rows_give_what_the_rows_give_alone(policy):
    logits, values = policy(PADDED, attention_mask=PADDED_MASK)
    for row in range(len(PADDED)):
        real = PADDED_MASK[row]
        alone_logits, alone_values = policy(PADDED[row : row + 1, real])
        torch.testing.assert_close(logits[row, real], alone_logits[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(values[row, real], alone_values[0], atol=1e-5, rtol=0)


def test_what_stands_in_the_padding_does_not_matter(policy):
    other = PADDED.masked_fill(~PADDED_MASK, 17)
    for one, two in zip(policy(PADDED, PADDED_MASK), policy(other, PADDED_MASK), strict=True):
        torch.testing.assert_close(one[PADDED_MASK], two[PADDED_MASK], atol=1e-6, rtol=0)


def test_left_padded_rows_have_the_gradient_of_the_rows_alone(policy):
    def gradients(pairs):
        policy.zero_grad()
        for logits, values in pairs:
            (logits.log_softmax(-1)[..., 0].sum() + values.sum()).backward()
        learned = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
        return {name: parameter.grad.clone() for name, parameter in learned}

    logits, values = policy(PADDED, attention_mask=PADDED_MASK)
    together = gradients([(logits[PADDED_MASK], values[PADDED_MASK])])
    alone = gradients(
        [policy(PADDED[row : row + 1, PADDED_MASK[row]]) for row in range(len(PADDED))]
    )
    for name, gradient in together.items():
        assert gradient.isfinite().all(), name
        torch.testing.assert_close(gradient, alone[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_step_of_the_backward_pass_of_left_padded_rows_is_nan(policy):
    """Masked in attention, a padded position would be a softmax over nothing, whose gradient is
    NaN even where a later step hides it.
    """
    with torch.autograd.detect_anomaly():
        logits, values = policy(PADDED, attention_mask=PADDED_MASK)
        (logits[PADDED_MASK].log_softmax(-1)[:, 0].sum() + values[PADDED_MASK].sum()).backward()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padding_token_inside_the_sequence_counts_like_any_other(gpt2_dir, make_policy, side):
    """GPT-2 pads with EOS, and its texts run on past EOS when stop_at_eos is off."""
    policy = make_policy(gpt2_dir)
    policy.base_model.tokenizer.padding_side = side
    tokens = torch.tensor([[0, 9, 0, 0, 20, 5], [0, 0, 4, 8, 0, 0]])
    hf_model = AutoModelForCausalLM.from_pretrained(str(gpt2_dir), local_files_only=True).eval()
    logits, values = policy(tokens)
    torch.testing.assert_close(logits, hf_model(tokens).logits, atol=1e-4, rtol=0)
    everything = torch.ones_like(tokens, dtype=torch.bool)
    masked_logits, masked_values = policy(tokens, attention_mask=everything)
    torch.testing.assert_close(masked_logits, logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(masked_values, values, atol=1e-6, rtol=0)


def test_the_mask_is_not_changed(policy):
    mask, tokens = PADDED_MASK.clone(), PADDED.clone()
    policy(tokens, attention_mask=mask)
    assert torch.equal(mask, PADDED_MASK) and torch.equal(tokens, PADDED)


HEAD_SITES = {
    "value_head.hook_in": 16,
    "value_head.hook_hidden": 64,
    "value_head.hook_value": 1,
}


def test_the_heads_hook_points_are_cached_beside_the_transformers(policy):
    (logits, values), cache = policy.run_with_cache(TOKENS)
    expected = policy(TOKENS)
    for one, other in zip((logits, values), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for name, width in HEAD_SITES.items():
        assert cache[name].shape == (*TOKENS.shape, width) and not cache[name].requires_grad
    assert torch.equal(cache["value_head.hook_in"], cache[VALUE_HOOK])
    assert torch.equal(cache["value_head.hook_value"][..., 0], values)
    assert cache["value_head.hook_hidden"].min() == 0
    _, of_the_model = policy.base_model.run_with_cache(TOKENS)
    assert cache.keys() - of_the_model.keys() == set(HEAD_SITES)
    torch.testing.assert_close(cache["resid_post", 0], of_the_model["resid_post", 0])


def test_run_with_cache_keeps_what_the_filter_names(policy):
    sites = ["blocks.0.hook_resid_post", "value_head.hook_value"]
    for names in (sites, sites.__contains__):
        assert set(policy.run_with_cache(TOKENS, names_filter=names)[1].keys()) == set(sites)
    _, cache = policy.run_with_cache(PADDED, PADDED_MASK, names_filter=sites[1])
    alone = policy(PADDED[2:, 5:])[1]
    torch.testing.assert_close(cache[sites[1]][2, :1, 0], alone[0])


@pytest.mark.slow
@pytest.mark.parametrize("site", HEAD_SITES)
def test_the_head_is_patched_and_ablated_at_its_hook_points(policy, site):
    """Zeroes at the input leave the head's value of 0, at the value 0 itself; logits stay."""
    logits, values = policy(TOKENS)
    with policy.hooks([(site, lambda x, hook: torch.zeros_like(x))]):
        ablated_logits, ablated = policy(TOKENS)
    assert torch.equal(ablated_logits, logits)
    at_zero = {
        "value_head.hook_in": policy.value_head(torch.zeros(1, 16))[0, 0],
        "value_head.hook_hidden": policy.value_head[2].bias[0],
        "value_head.hook_value": torch.zeros(()),
    }
    torch.testing.assert_close(ablated, at_zero[site].expand_as(ablated))
    assert torch.equal(policy(TOKENS)[1], values)


def test_hooks_of_both_kinds_fire_backwards_too_and_are_gone_afterwards(policy):
    seen = []
    hear = lambda x, hook: seen.append(hook.name)
    sites = ["blocks.1.hook_resid_post", "value_head.hook_hidden"]
    with policy.hooks([(site, hear) for site in sites], [(site, hear) for site in sites]):
        policy(TOKENS)[1].sum().backward()
    assert sorted(seen) == sorted(2 * sites)
    assert not any(point.fwd_hooks or point.bwd_hooks for point in policy.hook_dict.values())
    with pytest.raises(ConfigError, match="Unknown hook point 'value_head.hook_out'"):
        with policy.hooks([("value_head.hook_out", hear)]):
            pass


def test_a_hook_that_stays_on_the_head_stays(policy):
    policy.hook_dict["value_head.hook_value"].add_hook(lambda x, hook: 2 * x)
    doubled = policy(TOKENS)[1]
    with policy.hooks([("value_head.hook_value", lambda x, hook: None)]):
        assert torch.equal(policy(TOKENS)[1], doubled)
    assert torch.equal(policy(TOKENS)[1], doubled)
    policy.hook_dict["value_head.hook_value"].remove_hooks()
    torch.testing.assert_close(2 * policy(TOKENS)[1], doubled)


def test_hook_on_the_value_head_fires_in_sampling(policy):
    activations = []
    with policy.hooks([("value_head.hook_value", lambda x, hook: activations.append(x))]):
        samples = sample(policy, [[4, 9], [7, 13]], SamplingSpec(3))
    assert len(activations) == 3
    values = torch.stack([x[:, -1, 0] for x in activations], 1)
    torch.testing.assert_close(values, samples.values)


def test_weights_keep_their_names_so_that_earlier_checkpoints_load(policy):
    names = [name for name in policy.state_dict() if name.startswith("value_head.")]
    layers = [f"value_head.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    assert names == layers


def test_a_head_without_hook_points_is_read_as_before(gpt2_dir):
    model = load_model(str(gpt2_dir))
    policy = TransformerWithValueHead(model, nn.Linear(16, 1))
    (_, values), cache = policy.run_with_cache(TOKENS)
    assert not any(name.startswith("value_head.") for name in cache)
    torch.testing.assert_close(values, policy.value_head(cache[VALUE_HOOK])[..., 0])
