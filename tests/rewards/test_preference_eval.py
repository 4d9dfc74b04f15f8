"""A judge of pairs held to the truth, and what it reads."""

import math

import numpy as np
import pytest
import torch

from rlhf_lab.organism import Grammar
from rlhf_lab.organism.rewards import true_log_odds
from rlhf_lab.rewards.preference_eval import EDITS, judge, reading_of


def test_a_judge_by_hand():
    """Gaps log 3 and 0 where the truth has log 3 and -log 3; the first text won both."""
    gaps, truth = torch.tensor([math.log(3), 0.0]), torch.tensor([math.log(3), -math.log(3)])
    found = judge(gaps, truth, torch.tensor([True, True]))
    assert found.accuracy == pytest.approx(0.75)  # a win, and a tie
    assert found.as_truth == pytest.approx(0.75)
    assert found.error == pytest.approx((0 + 0.25) / 2)
    assert found.slope == pytest.approx(0.5)
    assert found.nll == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    assert found.best_nll == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


def test_the_truth_is_its_own_best_judge_and_ties_of_the_truth_are_left_out():
    truth = torch.tensor([2.0, -1.0, 0.0])
    found = judge(truth, truth, torch.tensor([True, False, True]))
    assert (found.as_truth, found.error, found.slope) == (1.0, 0.0, pytest.approx(1.0))
    assert found.nll == found.best_nll
    swapped = judge(-truth, truth, torch.tensor([True, False, True]))
    assert swapped.as_truth == 0.0 and swapped.slope == pytest.approx(-1.0)


@pytest.mark.usefixtures("no_type_checks")
def test_unequal_numbers_of_pairs_are_refused():
    with pytest.raises(ValueError, match="shape"):
        judge(torch.zeros(3), torch.zeros(3), torch.tensor([True]))


def test_the_truth_reads_every_word_for_what_it_is_worth():
    texts = Grammar().sample(20, np.random.default_rng(0)).texts()
    found = reading_of(lambda some: 0.5 * torch.from_numpy(true_log_odds(some)), texts)
    assert found.keys() == EDITS.keys()
    for change, exact in found.values():
        assert change.tolist() == pytest.approx([exact / 2] * len(texts))
    # a judge that counts one word reads that word alone, against the truth where it is one
    popcorn = lambda some: torch.tensor([-float("popcorn" in text) for text in some])
    found = reading_of(popcorn, [text for text in texts if "popcorn" not in text])
    assert found["tag to popcorn"][0].mean() == 1.0  # its size
    assert found["verb"][0].abs().max() == 0.0
