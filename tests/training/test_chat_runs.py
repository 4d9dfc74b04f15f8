"""Runs in a chat: prompts by the template, rewards of the response, conversations."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.functional import response_mask
from rlhf_lab.rewards import ConversationReward, ResponseReward
from rlhf_lab.training import RLHFTrainer
from tests.small_runs import DEVICE
from tests.tiny_models import tiny_chat

ASK = {"role": "user", "content": "w1 w2"}
MORE = [ASK, {"role": "assistant", "content": "w3"}, {"role": "user", "content": "w4"}]
RULED = [{"role": "system", "content": "w7"}, ASK]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_chat(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def args(base):
    def make(**changes):
        settings = dict(preset="reel", base_model=str(base), reward_fn="zero", chat=True)
        settings |= dict(gen_len=8, batch_size=8, num_minibatches=2, total_phases=1, device=DEVICE)
        return RLHFArgs(**(settings | {"stop_at_eos": False, "normalize_reward": False} | changes))

    return make


def of_transformers(trainer, turns):
    return trainer.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]


@pytest.fixture
def stored(tmp_path):
    """The same three conversations as JSONL and parquet."""
    rows = [{"ask": turns} for turns in ([ASK], MORE, RULED)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    return {kind: str(tmp_path / f"a.{kind}") for kind in ("jsonl", "parquet")}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_of_a_file_have_the_token_ids_of_transformers(args, stored, kind):
    trainer = RLHFTrainer(args(prompts=stored[kind], prompts_column="ask", system_prompt="w8"))
    rule = {"role": "system", "content": "w8"}
    turns = [[rule, ASK], [rule, *MORE], RULED]
    assert trainer.prompts.tokens == [of_transformers(trainer, each) for each in turns]
    assert trainer.prompts.turns == turns


def test_texts_are_user_turns_and_conversations_stay(args, tmp_path, no_type_checks):
    (tmp_path / "p.txt").write_text("w1 w2 w3\n")
    file = {"prompts": str(tmp_path / "p.txt"), "prompt_words": 2}
    rule, passed = RULED[:1], ["w1 w2", MORE]
    for fields, prompts, turns in (
        ({"prefix": "w1 w2"}, None, [[ASK]]),
        (file, None, [[ASK]]),
        ({"system_prompt": "w7"}, passed, [rule + [ASK], rule + MORE]),
    ):
        trainer = RLHFTrainer(args(**fields), prompts=prompts)
        assert trainer.prompts.tokens == [of_transformers(trainer, each) for each in turns]
    with pytest.raises(LoadError, match="prompt 2 has no messages"):
        RLHFTrainer(args(), prompts=["w1", 3])
    with pytest.raises(ConfigError, match="is a single text. Put it in a list"):
        RLHFTrainer(args(), prompts="w1")


def test_responses_end_with_the_turn_and_are_rewarded_alone(args):
    """With 29 random tokens, one in 29 ends a turn."""
    heard = {}

    def count_words(texts):
        heard["texts"] = texts
        return torch.tensor([float(len(text.split())) for text in texts])

    def of_turns(conversations):
        heard["turns"] = conversations
        return torch.ones(len(conversations))

    def apart(prompts, responses):
        heard["asked"], heard["responses"] = prompts, responses
        return torch.zeros(len(prompts))

    rewards = [count_words, ConversationReward(of_turns), ResponseReward(apart)]
    settings = args(batch_size=64, gen_len=20)
    trainer = RLHFTrainer(settings, prompts=[[ASK], MORE], reward_fn=rewards)
    rollout = trainer.rollout_phase()
    samples, read = rollout.samples, heard["texts"]
    tokenizer, prefix_len = trainer.tokenizer, samples.prefix_len
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    written = samples.tokens[:, prefix_len:]
    assert torch.equal(samples.mask, response_mask(written, [end]))
    ended = ((written == end) & samples.mask).any(1)
    assert 0 < ended.sum() < 64
    special = set(tokenizer.all_special_ids)
    assert heard["responses"] == read
    rows = zip(written, samples.mask, samples.prompts(), strict=True)
    for i, (row, mask, prompt) in enumerate(rows):
        words = tokenizer.convert_ids_to_tokens([t for t in row[mask].tolist() if t not in special])
        assert read[i] == " ".join(words)
        turns = {tuple(of_transformers(trainer, t)): t for t in ([ASK], MORE)}[tuple(prompt)]
        assert heard["turns"][i] == [*turns, {"role": "assistant", "content": read[i]}]
        assert heard["asked"][i] == turns[-1]["content"]
    paid = torch.tensor([len(text.split()) + 1.0 for text in read])
    assert torch.equal(rollout.raw_rewards.cpu(), paid)
    assert rollout.texts == samples.texts(tokenizer)
    assert all(text.startswith("user w1 w2 w0") for text in rollout.texts)


def test_stop_token_that_is_a_word_is_not_in_the_reward_text(args):
    texts = []
    settings = args(stop_tokens="w5", batch_size=64, gen_len=20)
    trainer = RLHFTrainer(settings, reward_fn=lambda t: texts.extend(t) or torch.zeros(len(t)))
    samples = trainer.rollout_phase().samples
    five = trainer.tokenizer.convert_tokens_to_ids("w5")
    assert (samples.tokens[:, samples.prefix_len :] == five).any()
    assert not any("w5" in text.split() for text in texts)


def test_labels_are_last_turns(args, tmp_path):
    rows = [{"prompt": [ASK], "good": "w5 w5"}, {"prompt": MORE, "good": "w5"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(prompts=str(tmp_path / "p.jsonl"), labels_column="good")
    turns = []

    def count(conversations):
        turns.extend(conversations)
        return torch.tensor([float(each[-1]["content"].count("w5")) for each in conversations])

    trainer = RLHFTrainer(args(**settings), reward_fn=ConversationReward(count))
    assert list(trainer.rewards.label_rewards.values()) == [2.0, 1.0]
    assert turns[-2:] == [
        [ASK, {"role": "assistant", "content": "w5 w5"}],
        [*MORE, {"role": "assistant", "content": "w5"}],
    ]


def test_invalid_row_raises_with_its_line(args, tmp_path):
    for row, changes, complaint in (
        ([ASK], {"chat": False}, "line 2 has a list under 'prompt'.*set chat=True"),
        ([ASK], {"prompt_words": 3}, "line 2 has messages. Leave out prompt_words=3"),
        (MORE[:2], {}, "line 2 ends with a message of 'assistant'"),
    ):
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in ("w1", row)]
        (tmp_path / "p.jsonl").write_text("".join(lines))
        with pytest.raises(LoadError, match=complaint):
            RLHFTrainer(args(prompts=str(tmp_path / "p.jsonl"), **changes))
