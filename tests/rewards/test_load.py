"""Reward functions by name: what each name loads, and names that are rejected."""

import numpy as np
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.conflicts import EXAMPLES, PLAIN_REWARDS, REEL_REWARDS, reward_names
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.organism import REWARDS, Grammar
from rlhf_lab.rewards import CountReward, SentimentReward, load_reward, score_texts, zero
from rlhf_lab.rewards.load import RULES, WITH_VALUES


def reel(reward_fn, **changes):
    return RLHFArgs(preset="reel", reward_fn=reward_fn, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sentiment", "zero", "count:the", *REEL_REWARDS])
def test_name_loads_its_reward(name, no_network):
    texts = [*Grammar().sample(12, np.random.default_rng(0)).texts(), "", "not of the language"]
    reward = load_reward(reel(name))
    rewards = score_texts(reward, texts)
    assert rewards.shape == (14,) and rewards.dtype == torch.float32
    assert name == "zero" or rewards.unique().numel() > 1
    assert name not in REEL_REWARDS or reward.name == name


def test_names_in_settings_are_those_that_load():
    assert REEL_REWARDS == tuple(REWARDS)
    assert set(PLAIN_REWARDS) == {"sentiment", "learned", *RULES}
    assert set(EXAMPLES) == WITH_VALUES.keys() - {"exact_match"}


def test_value_follows_first_colon():
    reward = load_reward(reel("count:a:b"))
    assert isinstance(reward, CountReward) and load_reward(reel("zero")) is zero
    assert reward(["a:b a:b", "a b"]).tolist() == [2.0, 0.0]


def test_several_names_load_as_weighted_sum():
    reward = load_reward(reel("count:a,count:b", reward_weights=[2, -0.5]))
    assert reward(["a a b", "b", ""]).tolist() == [3.5, -0.5, 0.0]
    assert list(reward.rewards) == ["count:a", "count:b"]


def test_sentiment_uses_direction_of_settings(no_network):
    texts = Grammar().sample(4, np.random.default_rng(0)).texts()
    pos, neg = (load_reward(reel("sentiment", direction=way)) for way in ("pos", "neg"))
    assert isinstance(pos, SentimentReward)
    torch.testing.assert_close(pos(texts) + neg(texts), torch.ones(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", "'nope' is unknown.*sentiment, learned, count:TEXT.*zero"),
        ("Sentiment", "'Sentiment' is unknown"),
        ("count", "'count' is unknown"),
        ("diversity:two", "requires a positive integer"),
        ("diversity:0", "requires a positive integer"),
    ],
)
def test_invalid_name_raises(name, words):
    with pytest.raises(ConfigError, match=words):
        load_reward(reel(name))


def test_missing_classifier_raises(tmp_path):
    with pytest.raises(LoadError, match="no model directory"):
        load_reward(reel("sentiment", reward_model=str(tmp_path / "nowhere")))


def test_wrong_number_of_weights_raises_before_models_load():
    fields = {"reward_model": "nowhere/at/all", "reward_weights": (1.0,)}
    with pytest.raises(ConfigError, match="Set one for each"):
        load_reward(reel("sentiment,length", **fields))


@pytest.mark.parametrize(
    ("reward_fn", "names"),
    [
        ("zero", ["zero"]),
        ("smoothed,length", ["smoothed", "length"]),
        ("count:a,b,zero", ["count:a,b", "zero"]),
        ("regex:a{1,3},diversity:2", ["regex:a{1,3}", "diversity:2"]),
        ("regex:a,golden", ["regex:a,golden"]),
        ("json_schema:a,b.json,count:x", ["json_schema:a,b.json", "count:x"]),
        ("exact_match:ignore_case,length", ["exact_match:ignore_case", "length"]),
    ],
)
def test_reward_names_split_before_a_name(reward_fn, names):
    assert reward_names(reward_fn) == names
