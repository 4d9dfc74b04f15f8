"""Several rewards with weights: their sum, their names, and what is refused."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs, reward_names
from rlhf_lab.config.reward_checks import NEEDED_VALUES, PLAIN_REWARDS, REEL_REWARDS
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import (
    CountReward,
    ResponseReward,
    TextBatch,
    TokenReward,
    WeightedRewards,
    load_reward,
    resolve_custom_reward,
    score_batch,
    split_rewards,
    zero,
)
from rlhf_lab.rewards.load import RULES, WITH_VALUES

TEXTS = ["a a b", "b", ""]
LETTERS = {"a": CountReward("a"), "b": CountReward("b")}


def args(**fields):
    return RLHFArgs(**({"preset": "reel", "reward_fn": "zero"} | fields))


def test_the_weighted_sum_by_hand():
    """2 a's and 1 b at weights 2 and -0.5: 3.5; 1 b: -0.5; nothing: 0."""
    rewards = WeightedRewards(LETTERS, (2.0, -0.5))
    assert rewards(TEXTS).tolist() == [3.5, -0.5, 0.0]
    output = score_batch(rewards, TextBatch(TEXTS))
    assert output.rewards.tolist() == [3.5, -0.5, 0.0] and output.token_rewards is None
    assert {name: each.tolist() for name, each in output.by_name.items()} == {
        "a": [2.0, 0.0, 0.0],
        "b": [1.0, 1.0, 0.0],
    }


def test_without_weights_each_counts_once():
    assert WeightedRewards(LETTERS)(TEXTS).tolist() == [3.0, 1.0, 0.0]


def test_a_list_is_named_by_functions_and_classes():
    def shortness(texts):
        return [-float(len(text)) for text in texts]

    of_responses = ResponseReward(lambda prompts, responses: [0.0] * len(prompts))
    several = WeightedRewards([shortness, CountReward("a"), of_responses])
    assert list(several.rewards) == ["shortness", "CountReward", "<lambda>"]
    assert list(split_rewards(several)) == list(several.weights)
    assert split_rewards(zero) == {"zero": zero}


def test_rewards_of_tokens_and_of_texts_add_up_with_their_weights(nano_samples):
    """Each token earns its own reward, and the last real one that of the text, too."""
    samples, texts = nano_samples
    of_tokens = TokenReward(lambda ids, mask: ids.float() * mask)
    several = WeightedRewards({"ids": of_tokens, "length": lambda t: [10.0] * len(t)}, (0.5, 2.0))
    output = score_batch(several, TextBatch(texts, samples=samples))
    expected = 0.5 * samples.tokens[:, samples.prefix_len :].float() * samples.mask
    for row, real in enumerate(samples.mask.sum(1).tolist()):
        expected[row, real - 1] += 20.0
    torch.testing.assert_close(output.token_rewards, expected)
    torch.testing.assert_close(output.rewards, expected.sum(1))
    assert output.by_name["length"].tolist() == [10.0] * len(texts)


@pytest.fixture
def nano_samples():
    from rlhf_lab.training import RLHFTrainer

    trainer = RLHFTrainer(args(batch_size=4, gen_len=6))
    rollout = trainer.rollout_phase()
    return rollout.samples, rollout.texts


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("rewards", "weights", "words"),
    [
        ({}, None, "empty"),
        ([], None, "empty"),
        ([zero, zero], None, "two rewards of the name 'zero'"),
        ({"a": 1.0}, None, "no function"),
        ({"a": WeightedRewards(LETTERS)}, None, "no function"),
        ({" ": zero}, None, "name it"),
        (LETTERS, (1.0,), "1 weights, and reward_fn has 2 rewards"),
        (LETTERS, (1.0, 2.0, 3.0), "give one for each"),
    ],
)
def test_what_cannot_be_summed_is_refused(rewards, weights, words):
    with pytest.raises(ConfigError, match=words) as caught:
        WeightedRewards(rewards, weights)
    assert "\n" not in str(caught.value)


def test_a_reward_that_fails_is_named():
    def broken(texts):
        raise ValueError("no model")

    with pytest.raises(ConfigError, match="the reward 'bad': reward_fn returned shape"):
        WeightedRewards({"good": zero, "bad": lambda texts: [1.0]})(TEXTS)
    with pytest.raises(ValueError, match="no model") as caught:
        WeightedRewards({"good": zero, "broken": broken})(TEXTS)
    assert caught.value.__notes__ == ["It came from the reward 'broken'."]


def test_rewards_that_are_handed_in_take_the_weights_of_the_settings():
    weighted = resolve_custom_reward(LETTERS, args(reward_weights=(0.0, 3.0)))
    assert weighted(TEXTS).tolist() == [3.0, 3.0, 0.0]
    assert resolve_custom_reward(zero, args()) is zero
    assert resolve_custom_reward(CountReward("a"), args(reward_weights=(2.0,)))(TEXTS).tolist() == [
        4.0,
        0,
        0,
    ]
    ready = WeightedRewards(LETTERS, (1.0, 1.0))
    assert resolve_custom_reward(ready, args()) is ready
    with pytest.raises(ConfigError, match="has its own"):
        resolve_custom_reward(ready, args(reward_weights=(1.0, 2.0)))


@pytest.mark.parametrize(
    ("reward_fn", "names"),
    [
        ("gold", ["gold"]),
        ("gold,length", ["gold", "length"]),
        ("gold, length", ["gold", "length"]),
        ("count:a,b", ["count:a,b"]),
        ("count:a,b,zero", ["count:a,b", "zero"]),
        ("regex:a{1,3},diversity:2", ["regex:a{1,3}", "diversity:2"]),
        ("regex:a,golden", ["regex:a,golden"]),
        ("json_schema:a,b.json,count:x", ["json_schema:a,b.json", "count:x"]),
        ("exact_match:ignore_case,length", ["exact_match:ignore_case", "length"]),
    ],
)
def test_a_comma_parts_rewards_where_a_name_follows(reward_fn, names):
    assert reward_names(reward_fn) == names


def test_the_names_in_the_settings_are_those_that_load():
    assert REEL_REWARDS == tuple(REWARDS)
    assert set(PLAIN_REWARDS) == {"sentiment", "learned", *RULES}
    assert set(NEEDED_VALUES) == WITH_VALUES.keys() - {"exact_match"}


def test_names_with_weights_load_as_their_sum():
    reward = load_reward(args(reward_fn="count:a,count:b", reward_weights=[2, -0.5]))
    assert reward(TEXTS).tolist() == [3.5, -0.5, 0.0]
    assert list(reward.rewards) == ["count:a", "count:b"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward_fn": "gold,gold"}, "names 'gold' twice"),
        ({"reward_fn": "gold,regex:"}, "regex:' names no pattern"),
        ({"reward_fn": "json_schema:"}, "names no file"),
        ({"reward_fn": "diversity:"}, "names no length"),
        ({"reward_fn": "diversity:two"}, "'two' words"),
        ({"reward_fn": "diversity:0"}, "from 1 to 999"),
        ({"reward_fn": "exact_match"}, "answers_column is not set"),
        ({"reward_fn": "exact_match:case"}, "option 'case'"),
        ({"answers_column": "answer"}, "answers_column='answer' is a column of prompts"),
        ({"reward_weights": ()}, "reward_weights=.* out of range"),
        ({"reward_weights": (1e39,)}, "reward_weights=.* out of range"),
        ({"reward_weights": (float("nan"),)}, "reward_weights=.* out of range"),
        ({"reward_weights": ("1",)}, "a list of numbers"),
        ({"reward_weights": (True,)}, "a list of numbers"),
        ({"reward_weights": 1.0}, "a list of numbers"),
        ({"reward_fn": "gold,length", "reward_per_token": True}, "needs a reward model"),
        (
            {"reward_fn": "diversity:2", "advantages": "remax", "normalize_reward": False},
            "the greedy answers",
        ),
        (
            {"reward_fn": "diversity:2", "dynamic_sampling": 2, "samples_per_prompt": 2},
            "dynamic_sampling=2 asks",
        ),
    ],
)
def test_settings_of_rewards_that_cannot_be_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        args(**fields)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_a_number_of_weights_that_does_not_fit_is_refused_before_models_load(weights):
    fields = {"reward_fn": "sentiment,length", "reward_model": "nowhere/at/all"}
    with pytest.raises(ConfigError, match="give one for each"):
        load_reward(args(**fields, reward_weights=weights))


def test_weights_come_back_from_json():
    given = args(reward_fn="gold,length", reward_weights=(1, 0.5))
    assert given.reward_weights == (1.0, 0.5) and given.to_dict()["reward_weights"] == [1.0, 0.5]
    assert RLHFArgs.from_dict(given.to_dict()) == given
