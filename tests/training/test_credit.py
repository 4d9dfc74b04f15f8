"""Advantages and returns in the trainer, groups, greedy baselines, and the policy losses."""

import dataclasses
import inspect
from typing import get_args

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import Advantages
from rlhf_lab.config.checks import NEED_GROUPS
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.outputs import PolicyOutputs
from rlhf_lab.training import Objective, Overrides, ReplayMinibatch
from rlhf_lab.training.objective import surrogate_per_token
from rlhf_lab.training.phase_stats import clipped_fraction
from rlhf_lab.training.ppo import assign_credit
from tests.training.recorded_runs import make_minibatch

GROUPS_OF_TWO = {"samples_per_prompt": 2, "normalize_reward": False}


def test_names_are_those_of_the_registry():
    assert set(get_args(Advantages)) == set(F.ADVANTAGES)
    compares = lambda function: "group" in inspect.signature(function).parameters
    assert set(NEED_GROUPS) == {name for name, f in F.ADVANTAGES.items() if compares(f)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gae", "one_step", "reinforce", "grpo"])
def test_returns_fit_the_estimator(make_trainer, name):
    """Without values, at gamma 1, the return of every real token is the reward at the end."""
    fields = {"gen_len": 26, "temperature": 20.0, "stop_tokens": "and"}
    fields |= {} if name == "grpo" else {"gamma": 0.9}
    rollout = make_trainer(advantages=name, **fields, **GROUPS_OF_TWO).rollout_phase()
    mask = rollout.samples.mask
    expected = rollout.advantages + (0 if name == "reinforce" else rollout.samples.values)
    if name == "grpo":
        expected = rollout.rewards[:, None].expand(mask.shape)
    assert not mask.all() and (rollout.returns[~mask] == 0).all()
    assert (rollout.teaching is None) == (name != "grpo")
    torch.testing.assert_close(rollout.returns[mask], expected[mask])


@pytest.mark.slow
def test_whitened_rewards_include_the_kl_and_exclude_padding(make_trainer):
    fields = {"temperature": 20.0, "gen_len": 28, "batch_size": 16, "stop_at_eos": True}
    fields |= {"kl_in": "reward", "kl_coef": 0.7, "advantages": "reinforce"}
    trainer = make_trainer(whiten_rewards=True, **fields)
    samples = trainer.rollout_phase().samples
    mask = samples.mask
    assert not mask.all()
    rewards, kl = torch.arange(16.0), torch.full(mask.shape, 0.1)
    token_rewards = -0.07 * mask.float()
    token_rewards[torch.arange(16), mask.sum(1) - 1] += rewards
    real = token_rewards[mask]
    scaled = (real - real.mean()) / real.std() + real.mean()
    expected = torch.zeros_like(token_rewards).masked_scatter(mask, scaled)
    to_go = expected.flip(1).cumsum(1).flip(1) * mask
    advantages, _ = assign_credit(trainer, samples, rewards, kl)
    torch.testing.assert_close(advantages, to_go, atol=1e-4, rtol=1e-5)


OLD = [[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]]
NEW = [[-1.5, -1.6, -3.0], [-0.4, -1.0, -9.9]]
ADVANTAGES = [[1.0, 2.0, -1.0], [-2.0, 0.5, 77.0]]
LENGTHS = (3, 2)
GSPO = {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "clip_coef": 0.02}
# settings, and the objective as a sum over the real tokens in Python floats
CASES = {
    "ppo": ({}, 0.07923776),
    "clip_higher": ({"clip_coef_high": 0.6}, 0.2359676),
    "dual_clip": ({"dual_clip": 1.05}, 0.1013061),
    "sequence_mean": ({"loss_aggregation": "sequence_mean"}, -0.06816368),
    "constant": ({"loss_aggregation": "constant"}, 0.03301574),
    "gspo": (GSPO, -0.2271547),
    "cispo": ({"policy_loss": "cispo"}, -0.3511727),
    "policy_gradient": ({"policy_loss": "policy_gradient"}, -0.28),
    "max_log_ratio": ({"max_log_ratio": 0.15}, 0.1109903),
    "whitened": ({"normalize_advantages": True, "policy_loss": "cispo"}, -0.1226969),
}
MASK = torch.arange(3) < torch.tensor(LENGTHS)[:, None]  # the last slot does not count
MINIBATCH = make_minibatch(torch.tensor(OLD), torch.tensor(ADVANTAGES), mask=MASK)


def policy_objective(logprobs: Tensor, minibatch: ReplayMinibatch, args, overrides) -> Tensor:
    """Return the policy objective as `objective_terms` calls it."""
    return Objective(args, overrides).surrogate(logprobs, minibatch)


@pytest.mark.parametrize("case", CASES)
def test_policy_loss_matches_hand_computed(reel_args, case):
    settings, expected = CASES[case]
    args = reel_args(**({"normalize_advantages": False} | settings))
    logprobs, minibatch = torch.tensor(NEW), MINIBATCH
    found = policy_objective(logprobs, minibatch, args, Overrides())
    assert found.item() == pytest.approx(expected, rel=1e-5)
    parts = surrogate_per_token(logprobs, minibatch, args)
    assert parts.sum().item() == pytest.approx(expected, rel=1e-5) and parts[1, 2].item() == 0.0


def test_constant_mean_divides_estimated_kl_by_gen_len(reel_args):
    args = reel_args(kl_estimator="k1", loss_aggregation="constant")
    minibatch = dataclasses.replace(MINIBATCH, ref_logprobs=torch.tensor(OLD))
    out = PolicyOutputs(*[torch.tensor(NEW)] * 3)
    found = Objective(args).kl_penalty(out, minibatch, 0.5)
    total = (torch.tensor(NEW) - torch.tensor(OLD))[MASK].sum().item()
    assert found.item() == pytest.approx(0.5 * total / (2 * args.gen_len))


def test_groups_of_equal_rewards_keep_their_zeros(reel_args):
    """Informative groups are whitened without the others, whose zeros would move their mean."""
    minibatch = dataclasses.replace(MINIBATCH, teaching=torch.tensor([True, False]))
    args = reel_args(policy_loss="policy_gradient", normalize_advantages=True)
    found = policy_objective(torch.tensor(NEW), minibatch, args, Overrides())
    whitened = F.whiten(torch.tensor(ADVANTAGES[0]))
    expected = (torch.tensor(NEW[0]) * whitened).sum() / sum(LENGTHS)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def gradient(args, overrides: Overrides) -> Tensor:
    logprobs = torch.tensor(NEW, requires_grad=True)
    policy_objective(logprobs, MINIBATCH, args, overrides).backward()
    return logprobs.grad


def test_masked_tokens_and_limited_ratios_have_no_gradient(reel_args):
    """Log-ratios -0.5, 0.4, 0, 0.1, 0.5: within 0.15 are the third and the fourth."""
    args = reel_args(max_log_ratio=0.15, clip_coef=0.9, normalize_advantages=False)
    found = gradient(args, Overrides())
    assert (found != 0).tolist() == [[False, False, True], [True, False, False]]


def test_registered_loss_as_a_function_equals_its_name(reel_args):
    args = reel_args(policy_loss="gspo", clip_coef=0.02)
    custom = Overrides(policy_loss=F.gspo_surrogate)
    assert torch.equal(gradient(args, Overrides()), gradient(args, custom))
    args = reel_args(policy_loss="policy_gradient")
    custom = lambda advantages, logprobs: advantages * logprobs
    assert torch.equal(gradient(args, Overrides()), gradient(args, Overrides(policy_loss=custom)))


def test_clip_fraction_counts_what_the_loss_clips(reel_args):
    """Ratios 0.61, 1.49, 1, 1.11, 1.65: outside 0.8..1.2 are 3 of 5, outside 0.8..1.6 are 2.

    GSPO's two mean log-ratios are -0.1/3 = -0.033 and 0.6/2 = 0.3: at 0.1, the second response's 2
    tokens of 5.
    """
    for fields, expected in (
        ({}, 0.6),
        ({"clip_coef_high": 0.6}, 0.4),
        ({"policy_loss": "gspo", "clip_coef": 0.1}, 0.4),
        ({"policy_loss": "policy_gradient"}, 0.0),
    ):
        found = clipped_fraction(torch.tensor(NEW), MINIBATCH, reel_args(**fields))
        assert found.item() == pytest.approx(expected)


def test_custom_function_that_is_not_called_raises(reel_args):
    for name, fields in (
        ("kl_penalty", {"kl_in": "reward"}),
        ("clipped_surrogate", {"policy_loss": "gspo"}),
        ("clipped_surrogate", {"dual_clip": 3.0}),
        ("normalize_reward", {"normalize_reward": False}),
    ):
        with pytest.raises(ConfigError, match=f"^{name} is (not )?called"):
            Objective(reel_args(**fields), Overrides(**{name: lambda *args: args[0].sum()}))
