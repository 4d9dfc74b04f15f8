"""The policy losses in the trainer's objective, against float64 sums over tokens."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import Objective, Overrides, ReplayMemory, ReplayMinibatch, RLHFTrainer
from rlhf_lab.training.objective import surrogate_per_token
from rlhf_lab.training.phase_stats import clipped_fraction

OLD = [[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]]
NEW = [[-1.5, -1.6, -3.0], [-0.4, -1.0, -9.9]]
ADVANTAGES = [[1.0, 2.0, -1.0], [-2.0, 0.5, 77.0]]
LENGTHS = (3, 2)
CASES = {
    "ppo": {},
    "clip_higher": {"clip_coef_high": 0.6},
    "dual_clip": {"dual_clip": 1.05},
    "sequence_mean": {"loss_aggregation": "sequence_mean"},
    "constant": {"loss_aggregation": "constant"},
    "gspo": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "clip_coef": 0.02},
    "cispo": {"policy_loss": "cispo"},
    "policy_gradient": {"policy_loss": "policy_gradient"},
    "max_log_ratio": {"max_log_ratio": 0.15},
    "whitened": {"normalize_advantages": True, "policy_loss": "cispo"},
}


def minibatch() -> ReplayMinibatch:
    """Two responses of 3 and 2 real tokens; what the last slot holds must not count."""
    mask = torch.tensor([[i < n for i in range(3)] for n in LENGTHS])
    empty = torch.zeros(2, 3)
    return ReplayMinibatch(
        tokens=torch.zeros(2, 5, dtype=torch.long),
        attention_mask=torch.ones(2, 5, dtype=torch.bool),
        mask=mask,
        logprobs=torch.tensor(OLD),
        values=empty,
        advantages=torch.tensor(ADVANTAGES),
        returns=empty,
        ref_residuals=torch.zeros(2, 3, 4),
        support=None,
    )


def clip(ratio: float, args) -> float:
    high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
    return min(max(ratio, 1 - args.clip_coef), 1 + high)


def by_hand(args) -> float:
    """The objective token by token, in Python's floats."""
    real = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]
    raw = [ADVANTAGES[i][t] for i, t in real]
    mean = sum(raw) / len(raw)
    std = math.sqrt(sum((a - mean) ** 2 for a in raw) / (len(raw) - 1) + 1e-8)
    total = 0.0
    for i, t in real:
        a = (ADVANTAGES[i][t] - mean) / std if args.normalize_advantages else ADVANTAGES[i][t]
        log_ratio = NEW[i][t] - OLD[i][t]
        if args.max_log_ratio is not None:
            log_ratio = min(max(log_ratio, -args.max_log_ratio), args.max_log_ratio)
        if args.policy_loss == "gspo":
            log_ratio = sum(NEW[i][s] - OLD[i][s] for s in range(LENGTHS[i])) / LENGTHS[i]
        ratio = math.exp(log_ratio)
        share = min(ratio * a, clip(ratio, args) * a)
        if args.dual_clip is not None and a < 0:
            share = max(share, args.dual_clip * a)
        if args.policy_loss == "cispo":
            share = clip(ratio, args) * a * NEW[i][t]
        if args.policy_loss == "policy_gradient":
            share = a * NEW[i][t]
        weights = {
            "token_mean": 1 / 5,
            "sequence_mean": 1 / (2 * LENGTHS[i]),
            "constant": 1 / (2 * args.gen_len),
        }
        total += share * weights[args.loss_aggregation]
    return total


def policy_objective(logprobs: Tensor, minibatch: ReplayMinibatch, args, functions) -> Tensor:
    """The policy's objective as `objective_terms` asks for it."""
    return Objective(args, functions).surrogate(logprobs, minibatch)


@pytest.mark.parametrize("case", CASES)
def test_every_policy_loss_is_the_sum_over_its_tokens(reel_args, case):
    args = reel_args(**({"normalize_advantages": False} | CASES[case]))
    found = policy_objective(torch.tensor(NEW), minibatch(), args, Overrides())
    assert found.item() == pytest.approx(by_hand(args), rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_shares_of_the_tokens_add_up_to_the_objective(reel_args, case):
    args = reel_args(**({"normalize_advantages": False} | CASES[case]))
    shares = surrogate_per_token(torch.tensor(NEW), minibatch(), args)
    assert shares.sum().item() == pytest.approx(by_hand(args), rel=1e-5)
    assert shares[1, 2].item() == 0.0


def test_the_cases_are_all_different(reel_args):
    plain = {"normalize_advantages": False}
    assert len({round(by_hand(reel_args(**(plain | case))), 6) for case in CASES.values()}) == 10


def gradient(args, functions: Overrides) -> Tensor:
    logprobs = torch.tensor(NEW, requires_grad=True)
    policy_objective(logprobs, minibatch(), args, functions).backward()
    return logprobs.grad


def test_masked_tokens_and_held_ratios_have_no_gradient(reel_args):
    """Log-ratios -0.5, 0.4, 0, 0.1, 0.5: within 0.15 are the third and the fourth."""
    args = reel_args(max_log_ratio=0.15, clip_coef=0.9, normalize_advantages=False)
    found = gradient(args, Overrides())
    assert (found != 0).tolist() == [[False, False, True], [True, False, False]]


def test_a_registered_loss_handed_in_is_the_same_as_its_name(reel_args):
    args = reel_args(policy_loss="gspo", clip_coef=0.02)
    by_hand = Overrides(policy_loss=F.gspo_surrogate)
    assert torch.equal(gradient(args, Overrides()), gradient(args, by_hand))


def test_an_own_surrogate_that_would_be_left_unused_is_refused(reel_args):
    own = {"clipped_surrogate": lambda *given: F.calc_clipped_surrogate_objective(*given)}
    for unused in ({"policy_loss": "gspo"}, {"dual_clip": 3.0}, {"clip_coef_high": 0.3}):
        with pytest.raises(ConfigError, match="clipped_surrogate is called for the plain"):
            RLHFTrainer(reel_args(**unused), **own)


def test_the_clip_fraction_counts_what_the_loss_clips(reel_args):
    """Ratios 0.61, 1.49, 1, 1.11, 1.65: outside 0.8..1.2 are 3 of 5, outside 0.8..1.6 are 2.

    GSPO's two mean log-ratios are -0.1/3 = -0.033 and 0.6/2 = 0.3: at 0.1, the second response's 2
    tokens of 5.
    """
    expected = [
        ({}, 0.6),
        ({"clip_coef_high": 0.6}, 0.4),
        ({"policy_loss": "gspo", "clip_coef": 0.1}, 0.4),
        ({"policy_loss": "policy_gradient"}, 0.0),
    ]
    for fields, share in expected:
        found = clipped_fraction(torch.tensor(NEW), minibatch(), reel_args(**fields))
        assert found.item() == pytest.approx(share)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name != "ppo"])
def test_every_policy_loss_trains(make_trainer, case):
    trainer = make_trainer(total_phases=1, warmup_steps=0, **CASES[case])
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    report = trainer.run_phase()
    assert math.isfinite(report.objective) and abs(report.ratio_first_minibatch - 1) < 1e-4
    after = list(trainer.policy.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_own_policy_losses_may_leave_out_what_they_do_not_use(make_trainer):
    trainer = make_trainer({"policy_loss": lambda advantages, logprobs: advantages * logprobs})
    rollout = trainer.rollout_phase()
    batch = next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator()))
    args = dataclasses.replace(trainer.args, policy_loss="policy_gradient")
    custom = policy_objective(batch.logprobs, batch, trainer.args, trainer.overrides)
    assert custom.item() == policy_objective(batch.logprobs, batch, args, Overrides()).item()
