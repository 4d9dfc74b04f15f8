"""Functions by name, and a learner's own function in their place."""

import functools

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F
from tests.functional.calls import draw_rollout

VALUES = tensor([[1.0, 3.0, 2.0], [0.5, 0.0, -1.0]])
REWARDS = tensor([10.0, -2.0])
MASK = tensor([[1, 1, 0], [1, 1, 1]]).bool()
TOKEN_REWARDS = F.token_rewards(REWARDS, MASK)
GROUP = tensor([0, 0])


def estimate(estimator, **settings):
    return F.estimate_advantages(estimator, VALUES, TOKEN_REWARDS, MASK, group=GROUP, **settings)


def test_settings_reach_the_estimator():
    gae, to_go = (estimate(name, gamma=0.5, lam=0.3) for name in ("gae", "reinforce"))
    assert torch.equal(gae, F.compute_gae(VALUES, TOKEN_REWARDS, 0.5, 0.3, MASK))
    assert torch.equal(to_go, F.rewards_to_go(TOKEN_REWARDS, 0.5, MASK))
    assert torch.equal(estimate("dr_grpo")[:, 0], tensor([6.0, -6.0]))


def test_kl_penalty_reaches_estimators_of_whole_sequences():
    token_rewards = F.token_rewards(REWARDS, MASK, torch.ones(2, 3), 0.5)
    # 10 - 2 * 0.5 = 9 and -2 - 3 * 0.5 = -3.5
    got = F.estimate_advantages("rloo", None, token_rewards, MASK, group=GROUP)
    assert got.tolist() == [[12.5, 12.5, 0.0], [-12.5] * 3]


def test_function_replaces_a_named_estimator():
    def reward_minus_value(values, rewards, mask):
        return rewards[:, None] - values

    expected = [[9.0, 7.0, 0.0], [-2.5, -2.0, -1.0]]
    assert estimate(reward_minus_value).tolist() == expected
    assert estimate(functools.partial(F.compute_gae, lam=1.0)).tolist() == expected
    for function, name in ((F.compute_gae, "gae"), (F.rloo_advantages, "rloo")):
        assert torch.equal(estimate(function, lam=0.3), estimate(name, lam=0.3))
    assert torch.equal(estimate(F.compute_advantages), estimate("one_step"))


def test_function_of_any_arguments_gets_values_rewards_and_mask():
    arguments = []
    record = lambda *args: arguments.extend(args) or F.compute_advantages(*args)
    assert torch.equal(estimate(record), estimate("one_step"))
    assert arguments[0] is VALUES and torch.equal(arguments[1], REWARDS) and arguments[2] is MASK


def test_estimate_advantages_raises_in_a_sentence():
    for estimator, values, message in (
        (lambda v, mask: v, VALUES, "no value for the parameter 'v' of .*token_rewards"),
        ("rloo", VALUES, "no value for the parameter 'group' of rloo_advantages"),
        ("gae", None, "no value for the parameter 'values' of compute_gae"),
        (lambda values: values[:, 1:], VALUES, r"returned shape \(2, 2\).*shape \(2, 3\)\."),
        ("vtrace", VALUES, "Unknown advantages 'vtrace'.*: one_step, gae"),
    ):
        with pytest.raises(ValueError, match=message):
            F.estimate_advantages(estimator, values, TOKEN_REWARDS, MASK)
    with pytest.raises(ValueError, match="lam=95.0 must be between 0 and 1"):
        F.estimate_advantages("gae", VALUES, TOKEN_REWARDS, MASK, lam=95.0)


def test_call_by_name_passes_named_and_set_arguments_only():
    def pair(a, *, b=2):
        return a, b

    assert F.call_by_name(pair, {"a": 1, "b": None, "c": 3}, "field") == (1, 2)
    assert F.call_by_name(lambda **all: all, {"a": 1, "b": None}, "field") == {"a": 1}
    assert F.call_by_name(lambda a, *rest: rest, {"a": 1}, "field") == ()
    in_order = F.call_by_name(lambda *all: all, {"a": 1, "b": None, "c": 3}, "field", ("c", "b"))
    assert in_order == (3, None)
    with pytest.raises(ValueError, match="field: no value for the parameter 'a' of pair"):
        F.call_by_name(pair, {"a": None, "b": 1}, "field")


def test_objective_of_ones_own_replaces_a_named_one():
    logprobs, old, advantages, mask = draw_rollout(3)
    two = F.calc_policy_objective(lambda logprobs, mask: logprobs * 0 + 2, logprobs, old, old, mask)
    assert two.item() == pytest.approx(2.0)
    in_order = lambda *all: F.ppo_surrogate(*all[:4], mask=all[4])
    got = F.calc_policy_objective(in_order, logprobs, old, advantages, mask)
    assert got == F.calc_policy_objective("ppo", logprobs, old, advantages, mask)
    scalar = lambda logprobs: logprobs.sum()
    for objective, settings, message in (
        (scalar, {}, r"policy_objective returned shape \(\) of torch.float64"),
        ("trpo", {}, "Unknown policy_objective 'trpo'. Choose one of: ppo"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip must be greater than 1, got 1.0"),
        ("gspo", {"dual_clip": 3.0}, "gspo_surrogate has no parameter 'dual_clip'"),
        ("policy_gradient", {"clip_coef_high": 0.3}, "has no parameter 'clip_coef_high'"),
    ):
        with pytest.raises(ValueError, match=message):
            F.calc_policy_objective(objective, logprobs, old, advantages, mask, **settings)
    anything = lambda **all: all["advantages"]
    F.calc_policy_objective(anything, logprobs, old, advantages, mask, dual_clip=3.0)


def test_kl_estimator_of_ones_own_replaces_a_named_one():
    two, half = tensor([[2.0]]), tensor([[0.5]])
    cube = lambda logprobs, ref_logprobs: (logprobs - ref_logprobs) ** 3
    assert F.kl_estimate(two, half, cube).item() == 1.5**3
    assert F.kl_estimate(two, half, lambda *both: both[0] - 2 * both[1]).item() == 1.0
    with pytest.raises(ValueError, match="Unknown kl_estimator 'k4'. Choose one of: k1, k2, k3"):
        F.kl_estimate(two, half, "k4")
