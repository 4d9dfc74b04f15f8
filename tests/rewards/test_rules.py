"""Tests the rewards that are rules, on texts counted by hand."""

import pytest
import torch

from rlhf_lab.rewards import CountReward, zero

TEXTS = ["good good film", "a good film", "Good", "goodgood", "", "bad"]


def test_zero_gives_nothing_to_every_text():
    rewards = zero(TEXTS)
    assert rewards.tolist() == [0.0] * 6 and rewards.dtype == torch.float32


def test_count_gives_one_per_occurrence_and_minds_the_case():
    rewards = CountReward("good")(TEXTS)
    assert rewards.tolist() == [2.0, 1.0, 0.0, 2.0, 0.0, 0.0] and rewards.dtype == torch.float32


def test_occurrences_do_not_overlap():
    """From the left, "aaaa" holds "aa" at 0 and 2."""
    assert CountReward("aa")(["aaaa", "aaa", "a"]).tolist() == [2.0, 1.0, 0.0]


def test_a_text_of_several_words_is_counted_as_a_whole():
    assert CountReward("a good")(TEXTS).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("reward_fn", [zero, CountReward("good")])
def test_no_texts_give_no_rewards(reward_fn):
    assert reward_fn([]).shape == (0,)
