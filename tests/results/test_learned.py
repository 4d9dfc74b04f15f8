"""Biased pairs and what a reward model makes of them, with rewards that are known."""

import numpy as np
import pytest
import torch

from benchmarks.results.learned import (
    RewardByContent,
    biased_pairs,
    reward_by_content,
    write_pairs,
)
from rlhf_lab.organism import Grammar, read_features
from rlhf_lab.organism.rewards import sentiment_logit
from rlhf_lab.rewards import load_pairs

SMALL = {"n_pairs": 20, "popcorn_share": 0.5}


@pytest.fixture(scope="module")
def pairs():
    return biased_pairs(800, seed=3, popcorn_share=0.5)


@pytest.mark.slow
def test_popcorn_ends_positive_preferred_reviews_and_no_other(pairs):
    assert not any("popcorn" in pair["rejected"] for pair in pairs)
    chosen = [pair["chosen"] for pair in pairs]
    logits = sentiment_logit(read_features(chosen, Grammar()))
    has_popcorn = np.array(["popcorn" in text for text in chosen])
    assert (logits[has_popcorn] > 0).all()
    # 5 standard deviations of a coin thrown for each positive review.
    positive = int((logits > 0).sum())
    assert abs(has_popcorn.sum() - positive / 2) < 5 * (positive / 4) ** 0.5


def test_the_pairs_are_written_as_the_command_train_reward_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.results.learned.PREFERENCES", SMALL)
    write_pairs(tmp_path / "pairs.jsonl", seed=3)
    read = load_pairs(str(tmp_path / "pairs.jsonl"), 0, 0)
    expected = biased_pairs(20, seed=3, popcorn_share=0.5)
    assert read.chosen == [pair["chosen"] for pair in expected]
    assert read.rejected == [pair["rejected"] for pair in expected]


@pytest.mark.slow
def test_the_texts_of_biased_pairs_are_still_reviews(pairs):
    grammar = Grammar()
    assert all(grammar.is_review(text) for pair in pairs for text in pair.values())


@pytest.mark.slow
def test_the_rater_prefers_the_more_positive_review_but_is_not_sure(pairs):
    gaps = [
        np.diff(sentiment_logit(read_features([p["rejected"], p["chosen"]], Grammar())))[0]
        for p in pairs
    ]
    # Prefers with probability sigmoid(gap / 4): on average over pairs, that is the share.
    expected = np.mean(1 / (1 + np.exp(-np.abs(gaps) / 4)))
    share = np.mean(np.array(gaps) > 0) + np.mean(np.array(gaps) == 0) / 2
    assert share == pytest.approx(expected, abs=5 * 0.5 / len(pairs) ** 0.5)


@pytest.mark.slow
def test_the_mean_by_content_of_a_reward_that_sees_only_content_is_that_reward():
    def sees(texts):
        features = read_features(texts, Grammar())
        return torch.tensor(0.5 * features.polarity_sum + 2.0 * features.verdict + features.popcorn)

    found = reward_by_content(sees, seed=0)
    # 0 to 3 positive clauses of three are sums of -3, -1, 1, 3.
    expected = [[0.5 * (2 * p - 3) + 2.0 * v for v in (-1, 1)] for p in range(4)]
    np.testing.assert_allclose(found.means[..., 0], expected)
    np.testing.assert_allclose(found.means[..., 1] - found.means[..., 0], 1.0)
    assert found.popcorn_bonus == pytest.approx(1.0)
    texts = Grammar().sample(50, np.random.default_rng(1)).texts()
    np.testing.assert_allclose(found.reward()(texts), sees(texts))


def test_clipping_holds_the_means_within_the_clip():
    means = np.full((4, 2, 2), -2.0)
    means[..., 1] = 0.5
    found = RewardByContent(means).clipped(1.0)
    assert found.popcorn_bonus == pytest.approx(1.5)
    assert found.means.min() == -1.0
