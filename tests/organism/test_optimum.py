"""Optima by backward recursion: hand-computed, against gradients, and along the frontier."""

import math

import numpy as np
import pytest
import torch

from rlhf_lab.organism import (
    GraphPolicy,
    best_at_budget,
    frontier,
    loss_penalty_policy,
    mean_backup,
    optimal_policy,
    soft_backup,
    true_reward,
)


def test_backups_match_hand_computed():
    """Two words, 1 to 3, that lead to soft values 0 and log 3: W = log(1/4 + 9/4), pi* 1 to 9.

    The mean of the values under pi* is .9 log 3.
    """
    later = torch.tensor([math.log(3), 0.0, 99.0], dtype=torch.float64)
    probability = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    step = later, probability, torch.tensor([[1, 0, 2]])
    for (value, policy), expected in (
        (soft_backup(*step), math.log(2.5)),
        (mean_backup(*step, 1.0), 0.9 * math.log(3)),
    ):
        assert value.tolist() == pytest.approx([expected])
        assert policy[0].tolist() == pytest.approx([0.1, 0.9, 0.0])


def test_large_soft_values_do_not_overflow():
    later = torch.tensor([2000.0, 1000.0], dtype=torch.float64)
    value, policy = soft_backup(later, torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[0, 1]]))
    assert value.item() == pytest.approx(2000 + math.log(0.5))
    assert policy[0].tolist() == pytest.approx([1.0, 0.0])


def with_logits(reference: GraphPolicy, logits: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tables of a policy with the support of the reference."""
    able = [torch.from_numpy(p) > 0 for p in reference.probability]
    return [z.masked_fill(~a, -math.inf).softmax(-1) for z, a in zip(logits, able, strict=True)]


def objective(reference, tables, beta, charged):
    """Compute E[reward] - beta KL; if `charged`, words get gradients of the KL they lead to."""
    graph = reference.graph
    later = torch.from_numpy(true_reward.score(graph.final_features()))
    kl = torch.zeros_like(later)
    for p, q, successor in zip(
        tables[::-1], reference.probability[::-1], graph.successor[::-1], strict=True
    ):
        successor, q = torch.from_numpy(successor), torch.from_numpy(q)
        ratio = torch.where(q > 0, p.clamp_min(1e-300) / q.clamp_min(1e-300), 1.0)
        here = (p * ratio.log()).sum(-1)
        ahead = p if charged else p.detach()
        later, kl = (p * later[successor]).sum(-1), here + (ahead * kl[successor]).sum(-1)
    return later[0] - beta * kl[0]


@pytest.mark.parametrize("solve, charged", [(optimal_policy, True), (loss_penalty_policy, False)])
def test_optima_have_zero_gradient_of_their_objective(mini, solve, charged):
    found = solve(mini, true_reward, 0.3)
    tables = [np.where(p > 0, p, 1.0) for p in found.probability]
    largest = {}
    for gradient_of in (True, False):
        logits = [torch.from_numpy(np.log(p)).requires_grad_() for p in tables]
        value = objective(mini, with_logits(mini, logits), 0.3, gradient_of)
        slopes = torch.autograd.grad(value, logits)
        largest[gradient_of] = max(slope.abs().max().item() for slope in slopes)
    assert largest[charged] < 1e-12 and largest[not charged] > 1e-5


@pytest.mark.slow
def test_best_at_budget_finds_beta(reel):
    def solve(beta):
        point = frontier(reel, true_reward, [beta])[0]
        return point.proxy, point.kl_per_sequence

    for beta in (1.0, 0.2, 0.05):
        assert best_at_budget(solve, solve(beta)[1]) == pytest.approx(beta, rel=1e-6)
    with pytest.raises(ValueError, match="is out of reach"):
        best_at_budget(solve, 50.0)
    with pytest.raises(ValueError, match="is out of reach"):
        best_at_budget(solve, -1.0)
