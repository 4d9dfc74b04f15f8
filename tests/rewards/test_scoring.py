"""Scoring of a batch: what a reward function may return and read, weighted sums, and names."""

import numpy as np
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import EXAMPLES, PLAIN_REWARDS, REEL_REWARDS, SUMS_NAMES, reward_names
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.organism import REWARDS
from rlhf_lab.organism.sums import SUMS_REWARDS
from rlhf_lab.rewards import (
    ConversationReward,
    CountReward,
    ResponseReward,
    TextBatch,
    TokenReward,
    WeightedRewards,
    load_reward,
    resolve_custom_reward,
    score_batch,
    score_texts,
    split_rewards,
)
from rlhf_lab.rewards.load import RULES, WITH_VALUES
from rlhf_lab.rewards.rules import zero
from rlhf_lab.samples import Samples

TEXTS = ["a a b", "b", ""]
LETTERS = {"a": CountReward("a"), "b": CountReward("b")}


def reel(reward_fn="zero", **fields):
    return RLHFArgs(preset="reel", reward_fn=reward_fn, **fields)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2],
        (1.0, 2.0),
        [True, 2],
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([1.0, 2.0], requires_grad=True),
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_score_texts_returns_detached_float32(returned):
    calls = []
    rewards = score_texts(lambda texts: calls.append(texts) or returned, ["x", "y"])
    assert rewards.tolist() == [1.0, 2.0] and rewards.dtype == torch.float32
    assert not rewards.requires_grad and calls == [["x", "y"]]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (0.0, r"shape \(\) of torch.float32 for 2 texts"),
        ([[1.0], [2.0]], r"shape \(2, 1\) of torch.float32 for 2 texts"),
        ([1.0, float("nan")], "nan for the text 'y'"),
        ([float("-inf"), 1.0], "-inf for the text 'x'"),
        ([1j, 2j], r"shape \(2,\) of torch.complex64 for 2 texts. Return one real number"),
        (None, "None for"),
        ([1.0, None], r"\[1.0, None\] for"),
        ({"x": 1.0}, "{.x.: 1.0} for"),
    ],
)
def test_score_texts_raises_unless_one_finite_number_per_text(returned, words):
    with pytest.raises(ConfigError, match=f"reward_fn returned {words}"):
        score_texts(lambda _: returned, ["x", "y"])


def test_score_texts_names_response_reward_for_other_arguments():
    with pytest.raises(ConfigError, match=r"missing a required argument.*ResponseReward"):
        score_texts(lambda prompts, responses: [0.0], ["x"])


@pytest.mark.usefixtures("no_type_checks")
def test_response_reward_reads_prompts_responses_and_answers():
    calls = []
    plain = ResponseReward(lambda *columns: calls.append(columns) or [0.0] * len(columns[0]))
    with_answers = ResponseReward(plain.function, answers=True)
    batch = TextBatch(["one two", "three four"], ["one", "three"], ["2", "4"])
    score_batch(plain, batch)
    score_batch(with_answers, batch)
    plain(["a text"])
    columns = ["one", "three"], [" two", " four"]
    assert calls == [columns, (*columns, ["2", "4"]), ([""], ["a text"])]
    with pytest.raises(ConfigError, match="set answers_column"):
        with_answers(["a text"])


def test_conversation_reward_reads_stripped_prompt_and_response():
    calls = []
    reward = ConversationReward(lambda chats: calls.extend(chats) or [0.0] * len(chats))
    score_batch(reward, TextBatch(["one two"], ["one"]))
    assert [(m["role"], m["content"]) for m in calls[0]] == [("user", "one"), ("assistant", "two")]


def test_weighted_sum_matches_hand_computed():
    """2 a's and 1 b at weights 2 and -0.5: 3.5; 1 b: -0.5; nothing: 0."""
    rewards = WeightedRewards(LETTERS, (2.0, -0.5))
    output = score_batch(rewards, TextBatch(TEXTS))
    assert output.rewards.tolist() == [3.5, -0.5, 0.0] and output.token_rewards is None
    by_name = {name: each.tolist() for name, each in output.by_name.items()}
    assert by_name == {"a": [2.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0]}
    assert WeightedRewards(LETTERS)(TEXTS).tolist() == [3.0, 1.0, 0.0]


def test_weighted_rewards_in_list_have_names_of_functions():
    def shortness(texts):
        return [-float(len(text)) for text in texts]

    several = WeightedRewards([shortness, CountReward("a"), ResponseReward(lambda p, r: [0.0])])
    assert list(split_rewards(several)) == ["shortness", "CountReward", "<lambda>"]
    assert split_rewards(zero) == {"zero": zero}


def test_token_and_text_rewards_sum_as_hand_computed():
    """Each token gets half its id, the last real one also 2 * 10; nan at padding is ignored."""
    tokens, mask = torch.tensor([[1, 2, 3, 4], [1, 5, 6, 7]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    empty, prompt = torch.zeros(2, 3), torch.ones(2, 1).bool()
    samples = Samples(tokens, prompt, mask.bool(), logprobs=empty, values=empty, support=None)
    of_tokens = TokenReward(lambda ids, mask: torch.where(mask, ids.add_(1) - 1.0, torch.nan))
    several = WeightedRewards({"ids": of_tokens, "ten": lambda t: [10.0] * len(t)}, (0.5, 2.0))
    output = score_batch(several, TextBatch(["x", "y"], samples=samples))
    assert output.token_rewards.tolist() == [[1.0, 21.5, 0.0], [2.5, 3.0, 23.5]]
    assert output.rewards.tolist() == [22.5, 29.0]
    assert output.by_name["ten"].tolist() == [10.0, 10.0] and tokens[0, 0] == 1  # it gets a copy


@pytest.mark.parametrize(
    ("rewards", "weights", "words"),
    [
        ({}, None, "empty"),
        ([zero, zero], None, "two rewards of one name"),
        ({"a": WeightedRewards(LETTERS)}, None, "has its own weights"),
        (LETTERS, (1.0,), "1 weights, and reward_fn has 2 rewards"),
    ],
)
def test_weighted_rewards_raise_on_invalid_input(rewards, weights, words):
    with pytest.raises(ConfigError, match=words):
        WeightedRewards(rewards, weights)


def test_error_of_one_reward_has_its_name():
    with pytest.raises(ConfigError, match="the reward 'bad' returned shape"):
        WeightedRewards({"good": zero, "bad": lambda texts: [1.0]})(TEXTS)


def test_custom_rewards_get_weights_of_settings():
    weighted = resolve_custom_reward(LETTERS, reel(reward_weights=(0.0, 3.0)))
    assert weighted(TEXTS).tolist() == [3.0, 3.0, 0.0]
    assert resolve_custom_reward(zero, reel()) is zero
    single = resolve_custom_reward(CountReward("a"), reel(reward_weights=(2.0,)))
    assert single(TEXTS).tolist() == [4.0, 0.0, 0.0]
    assert resolve_custom_reward(weighted, reel()) is weighted
    with pytest.raises(ConfigError, match="has its own weights"):
        resolve_custom_reward(weighted, reel(reward_weights=(1.0, 2.0)))


def test_names_in_settings_are_those_that_load():
    assert REEL_REWARDS == tuple(REWARDS) and SUMS_NAMES == tuple(SUMS_REWARDS)
    assert set(PLAIN_REWARDS) == {"sentiment", "learned", *RULES}
    assert set(EXAMPLES) == WITH_VALUES.keys() - {"exact_match"}


def test_names_load_values_weights_and_direction(no_network):
    assert load_reward(reel("count:a:b"))(["a:b a:b", "a b"]).tolist() == [2.0, 0.0]
    reward = load_reward(reel("count:a,count:b", reward_weights=[2, -0.5]))
    assert reward(TEXTS).tolist() == [3.5, -0.5, 0.0]
    assert list(reward.rewards) == ["count:a", "count:b"]
    assert load_reward(reel("sentiment", direction="neg")).rewarded_label == "NEGATIVE"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", "'nope' is unknown.*sentiment, learned, count:TEXT.*zero"),
        ("Sentiment", "'Sentiment' is unknown"),
        ("count", "'count' is unknown"),
        ("diversity:two", "requires a positive integer"),
    ],
)
def test_invalid_name_raises(name, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        load_reward(reel(name))
    with pytest.raises(LoadError, match="no model directory"):
        load_reward(reel("sentiment", reward_model=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("reward_fn", "names"),
    [
        ("zero", ["zero"]),
        ("smoothed, length", ["smoothed", "length"]),
        ("count:a,b,zero", ["count:a,b", "zero"]),
        ("regex:a{1,3},diversity:2", ["regex:a{1,3}", "diversity:2"]),
        ("json_schema:a,b.json,count:x", ["json_schema:a,b.json", "count:x"]),
        ("exact_match:ignore_case,length", ["exact_match:ignore_case", "length"]),
    ],
)
def test_reward_names_split_before_a_name(reward_fn, names):
    assert reward_names(reward_fn) == names
