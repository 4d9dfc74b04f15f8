"""Runs in a chat: prompts by the template, rewards of the response, conversations."""

import json

import numpy as np
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import LoadError
from rlhf_lab.functional import response_mask
from rlhf_lab.rewards import ConversationReward, ResponseReward
from rlhf_lab.training import RLHFTrainer
from tests.small_runs import DEVICE
from tests.tiny_models import tiny_chat

ASK = {"role": "user", "content": "w1 w2"}
MORE = [ASK, {"role": "assistant", "content": "w3"}, {"role": "user", "content": "w4"}]
RULED = [{"role": "system", "content": "w7"}, ASK]
MANY = {"batch_size": 64, "gen_len": 20}


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


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_messages_have_the_token_ids_of_transformers(args, tmp_path, no_type_checks):
    """Prompts of a file, texts (user turns), and passed conversations."""
    file = write_rows(tmp_path / "a.jsonl", [{"ask": turns} for turns in ([ASK], MORE, RULED)])
    (tmp_path / "p.txt").write_text("w1 w2 w3\n")
    rule, conversations = {"system_prompt": "w7"}, [RULED[:1] + [ASK], RULED[:1] + MORE]
    for fields, prompts, turns in (
        ({"prompts": file, "prompts_column": "ask"} | rule, None, [*conversations, RULED]),
        ({"prefix": "w1 w2"}, None, [[ASK]]),
        ({"prompts": str(tmp_path / "p.txt"), "prompt_words": 2}, None, [[ASK]]),
        (rule, np.array(["w1 w2", MORE], dtype=object), conversations),
    ):
        trainer = RLHFTrainer(args(**fields), prompts=prompts)
        assert trainer.prompts.tokens == [of_transformers(trainer, each) for each in turns]
        assert trainer.prompts.turns == turns
    with pytest.raises(LoadError, match="prompt 2 has no messages"):
        RLHFTrainer(args(), prompts=["w1", 3])


def test_responses_end_with_the_turn_and_are_rewarded_alone(args):
    """With 29 random tokens, one in 29 ends a turn."""
    seen = {}

    def count_words(texts):
        seen["texts"] = texts
        return torch.tensor([float(len(text.split())) for text in texts])

    def read_turns(conversations):
        seen["turns"] = conversations
        return torch.ones(len(conversations))

    def read_apart(prompts, responses):
        seen["prompts"], seen["responses"] = prompts, responses
        return torch.zeros(len(prompts))

    rewards = [count_words, ConversationReward(read_turns), ResponseReward(read_apart)]
    trainer = RLHFTrainer(args(**MANY), prompts=[[ASK], MORE], reward_fn=rewards)
    rollout = trainer.rollout_phase()
    samples, texts = rollout.samples, seen["texts"]
    tokenizer = trainer.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    responses = samples.tokens[:, samples.prefix_len :]
    assert torch.equal(samples.mask, response_mask(responses, [end]))
    assert 0 < ((responses == end) & samples.mask).any(1).sum() < 64
    special = set(tokenizer.all_special_ids)
    assert seen["responses"] == texts
    conversations = {tuple(of_transformers(trainer, turns)): turns for turns in ([ASK], MORE)}
    rows = zip(responses, samples.mask, samples.prompts(), strict=True)
    for i, (row, mask, prompt) in enumerate(rows):
        words = tokenizer.convert_ids_to_tokens([t for t in row[mask].tolist() if t not in special])
        assert texts[i] == " ".join(words)
        turns = conversations[tuple(prompt)]
        assert seen["turns"][i] == [*turns, {"role": "assistant", "content": texts[i]}]
        assert seen["prompts"][i] == turns[-1]["content"]
    rewards = torch.tensor([len(text.split()) + 1.0 for text in texts])
    assert torch.equal(rollout.raw_rewards.cpu(), rewards)
    assert rollout.texts == samples.texts(tokenizer)
    assert all(text.startswith("user w1 w2 w0") for text in rollout.texts)


def test_stop_token_that_is_a_word_is_not_in_the_reward_text(args):
    texts = []
    settings = args(stop_tokens="w5", **MANY)
    trainer = RLHFTrainer(settings, reward_fn=lambda t: texts.extend(t) or torch.zeros(len(t)))
    samples = trainer.rollout_phase().samples
    five = trainer.tokenizer.convert_tokens_to_ids("w5")
    assert (samples.tokens[:, samples.prefix_len :] == five).any()
    assert not any("w5" in text.split() for text in texts)


def test_labels_are_last_turns(args, tmp_path):
    rows = [{"prompt": [ASK], "good": "w5 w5"}, {"prompt": MORE, "good": "w5"}]
    reward = ConversationReward(lambda all_turns: [float(len(str(turns))) for turns in all_turns])
    settings = {"prompts": write_rows(tmp_path / "p.jsonl", rows), "labels_column": "good"}
    trainer = RLHFTrainer(args(**settings), reward_fn=reward)
    labeled = [[*row["prompt"], {"role": "assistant", "content": row["good"]}] for row in rows]
    assert list(trainer.rewards.label_rewards.values()) == reward.function(labeled)


def test_invalid_row_raises_with_its_line(args, tmp_path):
    for row, changes, complaint in (
        ([ASK], {"chat": False}, "line 2 has a list under 'prompt'.*set chat=True"),
        ([ASK], {"prompt_words": 3}, "line 2 has messages. Leave out prompt_words=3"),
    ):
        file = write_rows(tmp_path / "p.jsonl", [{"prompt": "w1"}, {"prompt": row}])
        with pytest.raises(LoadError, match=complaint):
            RLHFTrainer(args(prompts=file, **changes))
