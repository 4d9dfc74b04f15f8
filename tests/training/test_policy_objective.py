"""The policy losses in the objective, compared with sums over tokens in Python's floats."""

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.training import Objective, Overrides, ReplayMinibatch
from rlhf_lab.training.objective import surrogate_per_token
from rlhf_lab.training.phase_stats import clipped_fraction
from tests.training.recorded_runs import make_minibatch

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
    """Also as the sum of the parts of all tokens."""
    settings, expected = CASES[case]
    args = reel_args(**({"normalize_advantages": False} | settings))
    logprobs, minibatch = torch.tensor(NEW), MINIBATCH
    found = policy_objective(logprobs, minibatch, args, Overrides())
    assert found.item() == pytest.approx(expected, rel=1e-5)
    parts = surrogate_per_token(logprobs, minibatch, args)
    assert parts.sum().item() == pytest.approx(expected, rel=1e-5) and parts[1, 2].item() == 0.0


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
    """A custom loss may leave out parameters."""
    args = reel_args(policy_loss="gspo", clip_coef=0.02)
    custom = Overrides(policy_loss=F.gspo_surrogate)
    assert torch.equal(gradient(args, Overrides()), gradient(args, custom))
    args, custom = (
        reel_args(policy_loss="policy_gradient"),
        lambda advantages, logprobs: advantages * logprobs,
    )
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
