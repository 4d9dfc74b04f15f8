"""Reward models with one logit: each text as transformers reads it alone and unpadded."""

import json

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2Tokenizer,
)

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.rewards import LogitReward, SentimentReward, TextBatch, load_reward, score_batch
from rlhf_lab.training import RLHFTrainer
from tests.tiny_models import chat_tokenizer, randomize, save, tiny_chat

SIZES = dict(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, max_position_embeddings=64, num_labels=1)
SPECIAL = dict(bos_token_id=1, eos_token_id=2)
QWEN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def say(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


TURNS = [say("w1", "w2 w3"), say("w1 w4 w5 w6", "w7"), say("w2", "w3", "w4", "w5 w6 w8 w9")]


def stored(directory, model, tokenizer, seed=4):
    randomize(model, seed)
    for weight in model.parameters():
        weight.data *= 3 if weight.ndim == 2 else 1  # texts are to differ
    return str(save(model, tokenizer, directory))


def pair_tokenizer(single, pair, **changes):
    """Without a template, with special tokens around texts as they are put in pairs."""
    tokenizer = chat_tokenizer(None)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=ids
    )
    return tokenizer


def qwen_tokenizer():
    """A token per byte, ChatML and no BOS, as Qwen's, which ends a turn in a line break."""
    characters = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate(special + characters)}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=QWEN,
    )


@pytest.fixture(scope="module", params=["llama", "llama without pad", "qwen", "bert"])
def directory(request, tmp_path_factory):
    """Reward models of four kinds."""
    place = tmp_path_factory.mktemp("rewards") / "model"
    if request.param == "bert":
        model = BertForSequenceClassification(BertConfig(**SIZES, pad_token_id=3))
        tokenizer = pair_tokenizer("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    elif request.param == "qwen":
        settings = SIZES | dict(pad_token_id=0, num_key_value_heads=2, vocab_size=41)
        model = Qwen2ForSequenceClassification(Qwen2Config(**settings))
        tokenizer = qwen_tokenizer()
    else:
        pad = None if "without" in request.param else 3
        settings = SIZES | SPECIAL | dict(pad_token_id=pad, num_key_value_heads=2)
        model = LlamaForSequenceClassification(LlamaConfig(**settings))
        tokenizer = chat_tokenizer()
        if pad is None:
            tokenizer.pad_token = None
    return stored(place, model, tokenizer)


def alone(directory, turns):
    """A conversation by transformers alone, as the cards of such models do it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
    else:
        asked = "\n\n".join(turn["content"] for turn in turns[:-1])
        inputs = tokenizer(asked, turns[-1]["content"], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[0, 0]


def test_logits_are_those_of_each_text_alone(directory):
    reward = LogitReward(directory)
    expected = torch.stack([alone(directory, turns) for turns in TURNS])
    assert expected.std() > 0.01
    for order in ([0, 1, 2], [2, 1, 0]):
        for batch_size in (32, 2, 1):
            reward.batch_size = batch_size
            found = reward.logits([TURNS[i] for i in order])
            torch.testing.assert_close(found, expected[order], atol=1e-5, rtol=0)
    assert reward.logits([]).shape == (0,)


def test_ids_are_those_of_transformers_with_one_bos_at_most(directory):
    reward = LogitReward(directory)
    for turns in TURNS:
        ids = reward.encode(turns)["input_ids"]
        bos = reward.tokenizer.bos_token_id
        assert ids.count(bos) == (0 if bos is None else 1) and len(set(ids)) > 4
        if reward.tokenizer.chat_template:
            assert ids == reward.tokenizer.apply_chat_template(turns)["input_ids"]


def test_a_pair_has_the_segments_that_its_tokenizer_gives(tmp_path):
    model = BertForSequenceClassification(BertConfig(**SIZES, pad_token_id=3))
    model.bert.embeddings.token_type_embeddings.weight.data.normal_()  # so that they count
    tokenizer = pair_tokenizer("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    reward = LogitReward(stored(tmp_path / "model", model, tokenizer))
    without = reward.logits(TURNS)
    reward.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    found = reward.logits(TURNS)
    assert (found - without).abs().min() > 1e-3
    for turns, logit in zip(TURNS, found, strict=True):
        asked = "\n\n".join(turn["content"] for turn in turns[:-1])
        inputs = reward.tokenizer(asked, turns[-1]["content"], return_tensors="pt")
        assert set(inputs["token_type_ids"].flatten().tolist()) == {0, 1}
        torch.testing.assert_close(logit, reward.model(**inputs).logits[0, 0], atol=1e-5, rtol=0)


def test_a_pair_has_bos_at_its_beginning_alone_where_the_tokenizer_puts_two(tmp_path):
    settings = SIZES | SPECIAL | dict(pad_token_id=3, num_key_value_heads=2)
    tokenizer = pair_tokenizer("<s> $A", "<s> $A <s> $B:1")
    model = LlamaForSequenceClassification(LlamaConfig(**settings))
    directory = stored(tmp_path / "model", model, tokenizer)
    reward = LogitReward(directory)
    found = reward.encode(say("w1 <s> w2", "w3"))
    expected = tokenizer.convert_tokens_to_ids(["<s>", "w1", "<s>", "w2", "w3"])
    assert found["input_ids"] == expected


def test_what_is_too_long_is_refused_in_a_template_and_cut_in_a_pair(directory):
    reward = LogitReward(directory)
    long = say("w1 " * 70 + "w2 w3", "w4 w5")
    if reward.tokenizer.chat_template:
        with pytest.raises(ConfigError, match=r"has \d+ tokens, and the reward model .* reads 64"):
            reward.logits([long])
        return
    with pytest.warns(UserWarning, match="the beginning of the prompt is cut off"):
        ids = reward.encode(long)["input_ids"]
    words = reward.tokenizer.convert_ids_to_tokens(ids)
    assert len(ids) == 64 and words[-7:] == ["w1", "w2", "w3", "</s>", "w4", "w5", "</s>"]
    with pytest.warns(UserWarning), pytest.raises(ConfigError, match="shorten the prompts"):
        reward.logits([say("w1", "w2 " * 70)])


def test_weights_in_bf16_are_read_in_fp32_unless_asked(tmp_path):
    settings = SIZES | SPECIAL | dict(pad_token_id=3, num_key_value_heads=2)
    model = LlamaForSequenceClassification(LlamaConfig(**settings))
    randomize(model, 4)
    directory = str(save(model.to(torch.bfloat16), chat_tokenizer(), tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    dtype = lambda reward: {weight.dtype for weight in reward.model.parameters()}
    assert dtype(LogitReward(directory)) == {torch.float32}
    asked = LogitReward(directory, dtype=torch.bfloat16)
    assert dtype(asked) == {torch.bfloat16} and asked.logits(TURNS).dtype == torch.float32


def test_the_number_of_labels_chooses(directory, tmp_path):
    args = lambda **given: RLHFArgs(preset="reel", **given)
    reward = load_reward(args(reward_model=directory))
    assert isinstance(reward, LogitReward)
    assert isinstance(load_reward(args()), SentimentReward)
    for given in ({"direction": "neg"}, {"positive_label": "good"}):
        with pytest.raises(ConfigError, match="has one logit and no classes"):
            load_reward(args(reward_model=directory, **given))
    with pytest.raises(LoadError, match="has 2 labels. The logit reward requires"):
        LogitReward("reel-sentiment")


def test_texts_without_prompts_are_refused_and_plain_texts_are_split(directory):
    reward = LogitReward(directory)
    with pytest.raises(ConfigError, match="prompt and response, and there are texts only"):
        score_batch(reward, TextBatch(["w1"]))
    found = score_batch(reward, TextBatch(["w1 w2 w3"], ["w1"])).rewards
    torch.testing.assert_close(found[0], alone(directory, TURNS[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chat", [True, False])
def test_a_run_is_paid_the_logit_of_prompt_and_response(directory, tmp_path, chat):
    base = tiny_chat(tmp_path / "base")
    settings = dict(preset="reel", base_model=str(base), reward_model=directory, device="cpu")
    settings |= dict(gen_len=6, batch_size=6, total_phases=1, prefix="w1 w2", chat=chat)
    trainer = RLHFTrainer(RLHFArgs(**settings, normalize_reward=False))
    rollout = trainer.rollout_phase()
    prompt = trainer.rollout_phase().samples.prompt_texts(trainer.tokenizer)[0]
    for text, paid in zip(rollout.texts, rollout.raw_rewards, strict=True):
        answer = text.removeprefix(prompt).strip()
        expected = alone(directory, say("w1 w2", answer))
        torch.testing.assert_close(paid, expected, atol=1e-5, rtol=0)
