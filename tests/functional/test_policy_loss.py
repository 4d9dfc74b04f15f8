"""Policy objectives: PPO, GSPO, CISPO and the plain policy gradient."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F

NAN, INF = float("nan"), float("inf")
ROOT2 = math.sqrt(2)
# ratios 2, 2, 1/2, 1/2 with advantages 1, -1, 1, -1
CORNERS, SIGNS = tensor([[2.0, 2.0, 0.5, 0.5]]).log(), tensor([[1.0, -1.0, 1.0, -1.0]])
ZEROS = torch.zeros(1, 4)


def surrogate(name, logprobs, old, advantages, mask=None, low=0.2, high=0.3):
    if name == "policy_gradient":
        return F.policy_gradient_surrogate(logprobs, advantages, mask)
    return F.POLICY_OBJECTIVES[name](logprobs, old, advantages, low, high, mask=mask)


def test_clipped_objective_matches_hand_computed():
    # min(2, 1.2), min(-2, -1.2), min(.5, .8), min(-.5, -.8)
    logprobs = CORNERS.clone().requires_grad_()
    objective = F.calc_clipped_surrogate_objective(logprobs, ZEROS, SIGNS, 0.2, normalize=False)
    assert objective.item() == pytest.approx((1.2 - 2 + 0.5 - 0.8) / 4)
    objective.backward()
    # ratio * A / 4 where the clip does not stop it
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -0.5, 0.125, 0.0])
    # advantages 1, 3 whiten to -1/sqrt 2, 1/sqrt 2; ratios 1.1, 1.5 (clipped to 1.2)
    logprobs, old = tensor([[1.1, 1.5, NAN]]).log(), tensor([[0.0, 0.0, INF]])
    objective = F.calc_clipped_surrogate_objective(
        logprobs, old, tensor([[1.0, 3.0, NAN]]), 0.2, tensor([[True, True, False]])
    )
    assert objective.item() == pytest.approx((-1.1 + 1.2) / ROOT2 / 2, rel=1e-5)


def test_clip_higher_and_dual_clip_match_hand_computed():
    # ratios 1.25, 1.25, 0.75, 0.75: only the first and the last product are clipped at 0.2
    logprobs = tensor([[1.25, 1.25, 0.75, 0.75]]).log()
    both = F.ppo_surrogate(logprobs, ZEROS, SIGNS, 0.2)
    assert both[0].tolist() == pytest.approx([1.2, -1.25, 0.75, -0.8])
    higher = F.ppo_surrogate(logprobs, ZEROS, SIGNS, 0.2, 0.28)
    assert higher[0].tolist() == pytest.approx([1.25, -1.25, 0.75, -0.8])
    # floor 3: ratio 5, A = -2 gives -10, raised to -6; A = 2 gives 2.4; ratio 2: -4 is above -6
    logprobs = tensor([[5.0, 5.0, 2.0]]).log().requires_grad_()
    got = F.ppo_surrogate(logprobs, ZEROS[:, :3], tensor([[-2.0, 2.0, -2.0]]), 0.2, dual_clip=3.0)
    assert got[0].tolist() == pytest.approx([-6.0, 2.4, -4.0])
    got.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -4.0])


def test_gspo_matches_hand_computed():
    # ratios 2 and 8: s = 4; 1/2 alone; no token: 1
    logprobs = tensor([[2.0, 8.0], [0.5, NAN], [NAN, INF]]).log()
    mask = tensor([[1, 1], [1, 0], [0, 0]]).bool()
    ratio = F.sequence_ratio(logprobs, torch.zeros(3, 2), mask)
    assert ratio.tolist() == pytest.approx([4.0, 0.5, 1.0])
    # advantages 1 and -1 of s = 1.1: both within 0.2; of s = 4: 1.3 and -4
    logprobs = tensor([[1.1, 1.1], [4.0, 4.0]]).log().requires_grad_()
    got = F.gspo_surrogate(logprobs, torch.zeros(2, 2), SIGNS[:, :2].expand(2, 2), 0.2, 0.3)
    assert got.flatten().tolist() == pytest.approx([1.1, -1.1, 1.3, -4.0])
    got.sum().backward()
    # each token has the gradient of one log-probability only
    assert logprobs.grad.flatten().tolist() == pytest.approx([1.1, -1.1, 0.0, -4.0])


def test_cispo_and_policy_gradient_match_hand_computed():
    # weights clipped to 1.3, 1.3, 0.8, 0.8, without gradient
    logprobs = CORNERS.clone().requires_grad_()
    got = F.cispo_surrogate(logprobs, ZEROS, SIGNS, 0.2, 0.3)
    weights = tensor([[1.3, 1.3, 0.8, 0.8]])
    torch.testing.assert_close(got.detach(), weights * SIGNS * CORNERS)
    got.sum().backward()
    torch.testing.assert_close(logprobs.grad, weights * SIGNS)
    assert torch.equal(F.policy_gradient_surrogate(CORNERS, SIGNS), CORNERS * SIGNS)


def test_policy_gradient_objective_matches_hand_computed():
    logprobs = tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    advantages = tensor([[3.0, -1.0, INF]], requires_grad=True)
    objective = F.policy_gradient_objective(logprobs, advantages, tensor([[True, True, False]]))
    assert objective.item() == pytest.approx((-3 + 2) / 2)
    objective.backward()
    assert logprobs.grad.tolist() == [[1.5, -0.5, 0.0]] and advantages.grad is None


def test_ratio_is_limited_without_gradient():
    """A log-ratio above 20 is set to 20; exp(-500) is 0 in float32."""
    logprobs = tensor([[500.0, 30.0, -500.0, 1.0]], requires_grad=True)
    ratio = F.policy_ratio(logprobs, ZEROS)
    assert ratio[0].tolist() == pytest.approx([math.exp(20)] * 2 + [0.0, math.e])
    ratio.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, 0.0, math.e])
    assert F.sequence_ratio(logprobs[:, :1], ZEROS[:, :1]).item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize("name", F.POLICY_OBJECTIVES)
def test_runaway_ratios_stay_finite_in_value_and_gradient(name):
    logprobs = tensor([[0.0], [0.0], [-500.0], [30.0]], requires_grad=True)
    old = tensor([[-500.0], [-500.0], [0.0], [0.0]])
    advantages = tensor([[1.0], [-1.0], [1.0], [-1.0]])
    got = surrogate(name, logprobs, old, advantages)
    got.sum().backward()
    assert got.isfinite().all() and logprobs.grad.isfinite().all()
    if name in ("ppo", "gspo"):  # a limited ratio has no gradient
        assert got[3].item() == pytest.approx(-math.exp(20)) and logprobs.grad[3] == 0


def test_negative_clip_raises():
    with pytest.raises(ValueError, match=r"clip_coef must .*got -0\.1"):
        F.calc_clipped_surrogate_objective(ZEROS, ZEROS, ZEROS, -0.1)
    for function in (F.ppo_surrogate, F.gspo_surrogate, F.cispo_surrogate):
        for clips in ((-0.1, None), (0.2, -0.1)):
            with pytest.raises(
                ValueError, match=rf"{clips[0]} and .*{clips[1]} must be at least 0"
            ):
                function(ZEROS, ZEROS, ZEROS, *clips)
