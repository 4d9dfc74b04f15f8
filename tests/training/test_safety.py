"""Minibatches that have moved too far: the phase ends before them, or goes on without them."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import RunError
from rlhf_lab.training import ObjectiveTerms, ReplayMinibatch
from rlhf_lab.training.phase_stats import PhaseStats

EMPTY = torch.zeros(2, 2)


def judged(args, log_ratios: list[list[float]], mask: Tensor | None = None) -> str:
    """The verdict on log-probabilities that have moved by `log_ratios`."""
    new = torch.tensor(log_ratios)
    term = torch.tensor(0.0)
    minibatch = ReplayMinibatch(
        tokens=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        mask=torch.ones(2, 2, dtype=torch.bool) if mask is None else mask,
        logprobs=EMPTY,
        values=EMPTY,
        advantages=EMPTY,
        returns=EMPTY,
        ref_residuals=torch.zeros(2, 2, 4),
        support=None,
    )
    terms = ObjectiveTerms(term, term, term, term, term, new, EMPTY)
    return PhaseStats(SimpleNamespace(args=args)).judge(terms, minibatch)


def test_the_phase_stops_beyond_one_and_a_half_times_the_target(reel_args):
    """k3 of KL(old || new), ratio r: r - 1 - log r; at log r = 0.5: 0.14872 = 1.5 * 0.09915."""
    moved = [[0.5, 0.5], [0.5, 0.5]]
    assert judged(reel_args(target_kl=0.0991), moved) == "stop"
    assert judged(reel_args(target_kl=0.0992), moved) == "step"


def test_a_minibatch_is_skipped_above_the_mean_ratio(reel_args):
    """Ratios 1, 1, 1, 2: mean 1.25."""
    moved = [[0.0, 0.0], [0.0, math.log(2.0)]]
    assert judged(reel_args(ratio_threshold=1.24), moved) == "skip"
    assert judged(reel_args(ratio_threshold=1.26), moved) == "step"


def test_masked_tokens_count_for_nothing_and_no_limit_lets_all_pass(reel_args):
    mask = torch.tensor([[True, True], [True, False]])
    moved = [[0.0, 0.0], [0.0, math.inf]]
    limits = {"ratio_threshold": 1.01, "target_kl": 0.01}
    assert judged(reel_args(**limits), moved, mask) == "step"
    assert judged(reel_args(), moved) == "step"


def explosive(at: list[int]):
    """Log-probabilities that are suddenly 1000 higher at some calls, which are counted."""
    calls = []

    def logprobs(logits, tokens, prefix_len, temperature):
        calls.append(1)
        jump = 1000.0 if len(calls) - 1 in at else 0.0
        return F.get_logprobs(logits, tokens, prefix_len, temperature) + jump

    return logprobs


@pytest.mark.slow
def test_a_skipped_minibatch_is_counted_and_leaves_weights_and_means_finite(make_trainer):
    """Of 4 minibatches the third explodes: three steps, whose means are finite."""
    trainer = make_trainer({"logprobs": explosive([2])}, ratio_threshold=10.0, kl_coef=0.1)
    steps = []
    trainer.on("after_step")(lambda ctx: steps.append(ctx.step))
    stats = trainer.learning_phase(trainer.rollout_phase())
    assert (stats.skipped_minibatches, stats.unused_minibatches) == (1, 0)
    assert steps == [0, 1, 3]
    assert all(math.isfinite(value) for value in dataclasses.asdict(stats).values())
    assert all(p.isfinite().all() for p in trainer.policy.parameters())


@pytest.mark.slow
def test_an_early_stop_is_counted_with_all_that_it_left(make_trainer):
    """The third of 4 minibatches has moved too far: it and the fourth are left."""
    trainer = make_trainer({"logprobs": explosive([2])}, target_kl=1.0)
    steps = []
    trainer.on("after_step")(lambda ctx: steps.append(ctx.step))
    report = trainer.run_phase()
    assert (report.skipped_minibatches, report.unused_minibatches) == (0, 2)
    assert steps == [0, 1]
    assert trainer.run.read("metrics.jsonl")[0]["unused_minibatches"] == 2


@pytest.mark.slow
def test_a_phase_without_a_step_is_refused(make_trainer):
    trainer = make_trainer({"logprobs": explosive([0, 1, 2, 3])}, ratio_threshold=10.0)
    with pytest.warns(UserWarning, match="policy that sampled"):
        with pytest.raises(RunError, match="No step was taken in phase 0.*Raise ratio_threshold"):
            trainer.learning_phase(trainer.rollout_phase())


@pytest.mark.slow
def test_limits_that_are_never_reached_change_nothing(make_trainer, copy_parameters):
    plain, limited = make_trainer(), make_trainer(target_kl=1e6, ratio_threshold=1e6)
    for trainer in (plain, limited):
        trainer.train()
    ours, theirs = copy_parameters(limited.policy), copy_parameters(plain.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert limited.run.read("metrics.jsonl")[0]["skipped_minibatches"] == 0
