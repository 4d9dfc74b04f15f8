"""Minibatches whose policy has moved too far: the phase stops, or skips them."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import RunError
from rlhf_lab.training import ObjectiveTerms
from rlhf_lab.training.phase_stats import PhaseStats
from tests.training.recorded_runs import make_minibatch

EMPTY = torch.zeros(2, 2)


def judged(args, log_ratios: list[list[float]], mask: Tensor | None = None) -> str:
    """Return the verdict on log-probabilities that have moved by `log_ratios`."""
    new = torch.tensor(log_ratios)
    term = torch.tensor(0.0)
    mask = torch.ones(2, 2, dtype=torch.bool) if mask is None else mask
    minibatch = make_minibatch(EMPTY, EMPTY, mask=mask)
    terms = ObjectiveTerms(term, term, term, term, term, new, EMPTY)
    return PhaseStats(SimpleNamespace(args=args)).judge(terms, minibatch)


def test_verdicts_match_hand_computed(reel_args):
    """k3 of KL(old || new), ratio r: r - 1 - log r; at log r = 0.5: 0.14872 = 1.5 * 0.09915.

    Ratios 1, 1, 1, 2 have a mean of 1.25. Masked tokens do not count.
    """
    moved, outlier = [[0.5, 0.5]] * 2, [[0.0, 0.0], [0.0, math.log(2.0)]]
    assert judged(reel_args(target_kl=0.0991), moved) == "stop"
    assert judged(reel_args(target_kl=0.0992), moved) == "step"
    assert judged(reel_args(ratio_threshold=1.24), outlier) == "skip"
    assert judged(reel_args(ratio_threshold=1.26), outlier) == "step"
    mask = torch.tensor([[True, True], [True, False]])
    infinite = [[0.0, 0.0], [0.0, math.inf]]
    limits = {"ratio_threshold": 1.01, "target_kl": 0.01}
    assert judged(reel_args(**limits), infinite, mask) == "step"
    assert judged(reel_args(), infinite) == "step"


def explosive(at: list[int]):
    """Return log-probs that are 50 too high on the minibatches with these numbers."""
    calls = itertools.count()

    def logprobs(logits, tokens, prefix_len, temperature):
        jump = 50.0 if next(calls) in at else 0.0
        return F.get_logprobs(logits, tokens, prefix_len, temperature) + jump

    return logprobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "steps", "counts"),
    [({"ratio_threshold": 10.0}, [0, 1, 3], (1, 0)), ({"target_kl": 1.0}, [0, 1], (0, 2))],
    ids=["skip", "stop"],
)
def test_exploding_minibatch_is_counted_and_keeps_all_finite(make_trainer, limit, steps, counts):
    """The third of 4; after a stop, it and the fourth are unused."""
    trainer, seen = make_trainer({"logprobs": explosive([2])}, kl_coef=0.1, **limit), []
    trainer.on("after_step")(lambda ctx: seen.append(ctx.step))
    stats = trainer.learning_phase(trainer.rollout_phase())
    assert (stats.skipped_minibatches, stats.unused_minibatches) == counts and seen == steps
    assert all(math.isfinite(value) for value in dataclasses.asdict(stats).values())
    assert all(p.isfinite().all() for p in trainer.policy.parameters())


@pytest.mark.slow
def test_phase_without_a_step_raises(make_trainer):
    trainer = make_trainer({"logprobs": explosive([0, 1, 2, 3])}, ratio_threshold=10.0)
    with pytest.warns(UserWarning, match="policy that sampled"):
        with pytest.raises(RunError, match="No step was taken in phase 0.*Raise ratio_threshold"):
            trainer.learning_phase(trainer.rollout_phase())
