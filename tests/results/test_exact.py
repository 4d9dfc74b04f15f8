"""The exact curve beside the figures: against soft dynamic programming over states."""

import numpy as np
import pytest

from benchmarks.results.exact import ExactCurve
from rlhf_lab.organism import REWARDS
from rlhf_lab.probes.reel_truth import ReelTruth
from tests.organism.oracles import optimum_by_programming


@pytest.fixture(scope="module")
def gold_curve():
    return ExactCurve(REWARDS["gold"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gold", "soft_popcorn"])
def test_optima_at_a_price_and_at_their_kl_are_those_of_dynamic_programming(name):
    prices = [2.0, 0.37, 0.03]
    curve = ExactCurve(REWARDS[name])
    for beta in prices:
        solved = optimum_by_programming(curve.reference, curve.proxy, beta)
        assert curve.at_price(solved.beta) == pytest.approx(solved, abs=1e-9)
        found = curve.at_kl(solved.kl_per_sequence)
        assert found[1:] == pytest.approx(solved[1:], abs=1e-4)


@pytest.mark.slow
def test_more_kl_than_the_best_review_needs_buys_no_more(gold_curve):
    rewards, chances = ReelTruth().final_rewards
    best = rewards.max()
    needed = -np.log(chances[rewards > best - 1e-12].sum())
    for kl in (needed + 0.5, 40.0):
        assert gold_curve.at_kl(kl).gold == pytest.approx(best, abs=1e-4)


@pytest.mark.slow
def test_without_kl_the_reward_is_the_grammars_own(gold_curve):
    # gold is a posterior whose prior is one half.
    assert gold_curve.at_kl(0.0).gold == pytest.approx(0.5, abs=1e-3)
