"""Tests the names of rewards, and the refusal of whatever is not one finite number per text."""

import numpy as np
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.organism import Grammar
from rlhf_lab.rewards import CountReward, SentimentReward, load_reward, score_texts, zero

REEL_NAMES = ("gold", "soft", "soft_popcorn", "negblind", "bagsum", "length")


def reviews(n):
    return Grammar().sample(n, np.random.default_rng(0)).texts()


def reel(reward_fn, **changes):
    return RLHFArgs(preset="reel", reward_fn=reward_fn, **changes)


def refusal(returned, texts=("x", "y")):
    with pytest.raises(ConfigError) as caught:
        score_texts(lambda _: returned, list(texts))
    sentence = str(caught.value)
    assert "reward_fn" in sentence and "\n" not in sentence
    return sentence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sentiment", "zero", "count:the", *REEL_NAMES])
def test_every_name_gives_one_finite_number_per_text(name, no_network):
    texts = [*reviews(12), "", "not of the language"]
    rewards = score_texts(load_reward(reel(name)), texts)
    assert rewards.shape == (14,) and rewards.dtype == torch.float32
    assert name == "zero" or rewards.unique().numel() > 1


def test_each_name_gives_the_reward_of_that_name():
    rewards = {name: load_reward(reel(name)) for name in REEL_NAMES}
    assert {name: reward.name for name, reward in rewards.items()} == {n: n for n in REEL_NAMES}
    assert load_reward(reel("zero")) is zero


def test_the_text_to_count_stands_after_the_first_colon():
    reward = load_reward(reel("count:a:b"))
    assert isinstance(reward, CountReward)
    assert reward(["a:b a:b", "a b"]).tolist() == [2.0, 0.0]


def test_sentiment_takes_its_model_and_direction_from_the_arguments(no_network):
    texts = reviews(4)
    pos = load_reward(reel("sentiment", direction="pos"))
    neg = load_reward(reel("sentiment", direction="neg"))
    assert isinstance(pos, SentimentReward)
    torch.testing.assert_close(pos(texts) + neg(texts), torch.ones(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["nope", "Sentiment", "count", " gold", "gold "])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError) as caught:
        load_reward(reel(name))
    sentence = str(caught.value)
    assert repr(name) in sentence and "\n" not in sentence
    assert all(known in sentence for known in ("sentiment", "zero", "count:TEXT", *REEL_NAMES))


def test_a_missing_classifier_is_named(tmp_path):
    with pytest.raises(LoadError, match="no model directory"):
        load_reward(reel("sentiment", reward_model=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2],
        [1.0, 2.0],
        (1.0, 2.0),
        [True, 2],
        np.array([1.0, 2.0]),
        torch.tensor([1, 2]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_lists_arrays_and_tensors_of_numbers_become_float32(returned):
    rewards = score_texts(lambda texts: returned, ["x", "y"])
    assert rewards.tolist() == [1.0, 2.0] and rewards.dtype == torch.float32


def test_a_reward_that_carries_a_gradient_is_cut_off_from_it():
    weight = torch.ones(2, requires_grad=True)
    assert not score_texts(lambda texts: 2 * weight, ["x", "y"]).requires_grad


def test_the_function_is_given_all_texts_at_once():
    seen = []
    score_texts(lambda texts: seen.append(texts) or [0.0] * len(texts), ["x", "y", "z"])
    assert seen == [["x", "y", "z"]]


@pytest.mark.parametrize(
    ("returned", "shape"),
    [
        (0.0, "()"),
        ([1.0], "(1,)"),
        ([1.0, 2.0, 3.0], "(3,)"),
        ([[1.0], [2.0]], "(2, 1)"),
        (torch.zeros(1, 2), "(1, 2)"),
        ([], "(0,)"),
    ],
)
def test_a_wrong_shape_is_refused_with_shape_and_number_of_texts(returned, shape):
    sentence = refusal(returned)
    assert shape in sentence and "2 texts" in sentence


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused_with_its_text(bad):
    sentence = refusal([1.0, bad, 2.0], ["first", "second", "third"])
    assert str(bad) in sentence and "'second'" in sentence and "'first'" not in sentence


@pytest.mark.parametrize(
    "returned", [None, "12", ["1", "2"], [1.0, None], {"x": 1.0, "y": 2.0}, [[1.0], [2.0, 3.0]]]
)
def test_what_is_not_numbers_is_refused(returned):
    refusal(returned)


def test_complex_numbers_are_refused():
    refusal(torch.tensor([1 + 1j, 2]))
