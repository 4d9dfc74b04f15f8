"""Rewards by classifiers, compared with transformers on each text alone and unpadded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.rewards import (
    LogitReward,
    SentimentReward,
    TextBatch,
    load_reward,
    score_batch,
    sentiment_reward,
)
from rlhf_lab.rewards.classifiers import _positive_class
from rlhf_lab.training import RLHFTrainer
from tests.bad_input.command_outcome import accepted, rejected
from tests.small_runs import DEVICE
from tests.tiny_models import chat_tokenizer, llama_tokenizer, randomize, save, tiny_chat

SHORT, MIDDLE = "w1 w7", "w4 w4 w2 w13 w9"
LONG = "w3 w5 w8 w0 w11 w17 w2 w2 w19 w6 w10 w4 w1"
LABELS = ("NEGATIVE", "POSITIVE")
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
SPECIAL = dict(bos_token_id=1, eos_token_id=2, num_key_value_heads=2)


def named(labels):
    names = dict(enumerate(labels))
    return {"id2label": names, "label2id": {name: i for i, name in names.items()}}


@pytest.fixture
def make_classifier(tmp_path):
    """Write a random two-class classifier and return its directory."""

    def make(labels=LABELS, kind="distilbert", dtype=torch.float32, **changes):
        if kind == "roberta":  # it counts positions from pad_token_id + 1
            sizes = SIZES | dict(vocab_size=24, max_position_embeddings=24, pad_token_id=3)
            model = RobertaForSequenceClassification(RobertaConfig(**sizes, **named(labels)))
        elif kind == "gpt2":
            sizes = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=24, n_positions=20)
            model = GPT2ForSequenceClassification(GPT2Config(**sizes, **named(labels)))
        else:
            sizes = dict(dim=16, hidden_dim=32, n_layers=1, n_heads=2, vocab_size=24)
            sizes |= dict(max_position_embeddings=20, pad_token_id=3) | named(labels) | changes
            model = DistilBertForSequenceClassification(DistilBertConfig(**sizes))
        randomize(model, 4)
        return str(save(model.to(dtype), llama_tokenizer(), tmp_path / kind))

    return make


def probability_alone(directory, text, index):
    """One text, no padding, in double precision."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64)
    ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    with torch.no_grad():
        weights = model.eval()(torch.tensor([ids])).logits[0].exp()
    return (weights[index] / weights.sum()).item()


@pytest.mark.parametrize("kind", ["distilbert", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sentiment_matches_each_text_alone(make_classifier, kind, dtype, no_network):
    """In any batch, order and stored dtype, and without gradients or dropout."""
    directory = make_classifier(kind=kind, dtype=dtype)
    texts = [SHORT, LONG, MIDDLE]
    expected = [probability_alone(directory, text, 1) for text in texts]
    assert max(expected) - min(expected) > 0.01
    for batch_size in (1, 2, 128):
        rewards = SentimentReward(directory, batch_size=batch_size)(texts)
        assert rewards.tolist() == pytest.approx(expected, abs=1e-6)
        assert rewards.dtype == torch.float32 and not rewards.requires_grad
    against = SentimentReward(directory, "neg")
    assert (rewards + against(texts)).tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    assert "'NEGATIVE'" in against.summary() and against([]).shape == (0,)


@pytest.mark.parametrize("kind", ["distilbert", "roberta"])
def test_long_text_is_cut_to_what_the_classifier_reads(make_classifier, kind):
    reward = SentimentReward(make_classifier(kind=kind))
    words = [f"w{i % 20}" for i in range(500)]
    long, cut, shorter = reward([" ".join(words[:n]) for n in (500, 20, 19)])
    assert long == pytest.approx(cut.item(), abs=1e-6) and (long - shorter).abs() > 1e-5
    first = sentiment_reward([LONG, SHORT], reward.tokenizer, reward.model, 0, max_length=3)
    ids = torch.tensor([reward.tokenizer(LONG)["input_ids"][:3]])
    expected = reward.model(ids).logits.softmax(-1)[0, 0].item()
    assert first[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "label", "positive"),
    [
        (("NEGATIVE", "POSITIVE"), None, 1),
        (("LABEL_1", "LABEL_0"), None, 0),
        (("Positive sentiment", "Negative sentiment"), None, 0),
        (("NEG", "POS_CLASS"), None, 1),
        (("good", "bad"), "good", 0),
        (("bad", "Good "), " gOOD", 1),
        (("positive", "negative"), "negative", 1),
        (("good", "bad"), None, None),
        (("negation", "position"), None, None),
        (("good", "bad"), "goods", None),
        (("positive", "negative"), "LABEL_1", None),
    ],
    ids=str,
)
def test_positive_class_is_found_by_names_or_raises(labels, label, positive):
    config = DistilBertConfig(**named(labels))
    if positive is not None:
        assert _positive_class(config, label, "model") == positive
        return
    with pytest.raises(ConfigError, match="positive_label") as caught:
        _positive_class(config, label, "model")
    assert all(repr(name) in str(caught.value) for name in labels)


def change_config(directory, **changes):
    path = Path(directory, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
def test_unfit_classifiers_raise(make_classifier, tmp_path, no_network):
    directory = make_classifier()
    for number, (change, words) in enumerate(
        [
            ({"label2id": {"POSITIVE": 0, "NEGATIVE": 1}}, "label2id"),
            ({"id2label": {"1": "neg", "2": "pos"}}, "id2label"),
            ({"num_labels": 2, "id2label": {"0": "a", "1": "b", "2": "c"}}, "num_labels=2.*'2'"),
        ]
    ):
        place = Path(shutil.copytree(directory, tmp_path / str(number)))
        change_config(place, **change)
        with pytest.raises(LoadError, match=words):
            SentimentReward(str(place))
    for place, words in (
        ("reel-nano", "reel-nano"),
        (make_classifier(["a", "b", "c"], "gpt2"), "requires two classes"),
        (make_classifier(vocab_size=20), "the model has 20 embeddings"),
    ):
        with pytest.raises(LoadError, match=words):
            SentimentReward(place)


@pytest.mark.slow
def test_run_names_its_rewarded_class_and_notices_changed_names(
    make_classifier, gpt2_dir, tmp_path
):
    model, out = make_classifier(["bad", "good"]), tmp_path / "run"
    named = ["--reward-model", model, "--positive-label", "good"]
    outcome = accepted(["score", "w1 w7", *named])
    assert outcome.err == f"rewarding the class 'good' of {model}\n" and len(outcome.out) == 13
    train = f"train --total-phases 1 --batch-size 4 --num-minibatches 1 --base-model {gpt2_dir}"
    train += " --warmup-steps 0 --gen-len 4 --prefix w1 --direction neg"
    first = accepted([*train.split(), *named, "--out", out])
    info = json.loads((out / "run.json").read_text())
    assert info["sources"]["rewarded_class"] == {"index": 0, "label": "bad"}
    for printed in (first.out, accepted(["resume", out, "--total-phases", "2"]).out):
        assert f"rewarding the class 'bad' of {model}" in printed
    names = {"id2label": {"0": "good", "1": "bad"}, "label2id": {"good": 0, "bad": 1}}
    change_config(model, architectures=["XLMRobertaForSequenceClassification"], **names)
    message = "rewarded_class has changed since the run started, from {'index': 0, 'label': 'bad'}"
    for command in ("sample -n 1", "best-of-n --n 1 --n-prompts 1", "resume --total-phases 3"):
        name, *options = command.split()
        assert message in accepted([name, out, *options]).err
    unnamed = accepted(
        [*train.split()[:-2], "--reward-model", make_classifier(), "--out", f"{out}2"]
    )
    change_config(make_classifier(), **names)
    assert unnamed and rejected(["resume", f"{out}2", "--total-phases", "2"], "--positive-label")


def dialog(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


TURNS = [
    dialog("w1", "w2 w3"),
    dialog("w1 w4 w5 w6", "w7"),
    dialog("w2", "w3", "w4", "w5 w6 w8 w9"),
]


@pytest.fixture(scope="module", params=["llama", "llama without pad", "bert", "bert segments"])
def directory(request, tmp_path_factory):
    """Reward models with one logit: with a chat template, or for pairs of texts."""
    settings = SIZES | dict(vocab_size=29, max_position_embeddings=64, num_labels=1)
    if request.param.startswith("bert"):
        model = BertForSequenceClassification(BertConfig(**settings, pad_token_id=3))
        tokenizer = chat_tokenizer(None)
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ids
        )
        if "segments" in request.param:
            tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    else:
        pad = None if "without" in request.param else 3
        model = LlamaForSequenceClassification(LlamaConfig(**settings, **SPECIAL, pad_token_id=pad))
        tokenizer = chat_tokenizer()
        tokenizer.pad_token = None if pad is None else tokenizer.pad_token
    randomize(model, 4)
    for weight in model.parameters():
        weight.data *= 3 if weight.ndim == 2 else 1  # the logits of texts differ
    model = model.to(torch.bfloat16) if request.param == "llama" else model
    return str(save(model, tokenizer, tmp_path_factory.mktemp("rewards") / "model"))


def logit_alone(directory, turns):
    """A conversation by transformers, as model cards do it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
    else:
        prompt = "\n\n".join(turn["content"] for turn in turns[:-1])
        inputs = tokenizer(prompt, turns[-1]["content"], return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**inputs).logits[0, 0].item()


def test_logits_match_each_text_alone(directory):
    """Weights that are stored in bf16 are read in float32."""
    reward = LogitReward(directory)
    expected = [logit_alone(directory, turns) for turns in TURNS]
    assert torch.tensor(expected).std() > 0.01
    for order in ([0, 1, 2], [2, 1, 0]):
        for reward.batch_size in (32, 2, 1):
            logits = reward.logits([TURNS[i] for i in order]).tolist()
            assert logits == pytest.approx([expected[i] for i in order], abs=1e-5)
    assert reward.logits([]).shape == (0,)
    with pytest.raises(ConfigError, match=r"has \d+ tokens, and the reward model .* reads 64"):
        reward.logits([dialog("w1 " * 70, "w4 w5")])
    with pytest.raises(ConfigError, match="prompt and response, and there are texts only"):
        score_batch(reward, TextBatch(["w1"]))
    rewards = score_batch(reward, TextBatch(["w1 w2 w3"], ["w1"])).rewards
    assert rewards.tolist() == pytest.approx(expected[:1], abs=1e-5)


def test_number_of_labels_chooses_reward(directory):
    args = lambda **fields: RLHFArgs(preset="reel", **fields)
    assert isinstance(load_reward(args(reward_model=directory)), LogitReward)
    assert isinstance(load_reward(args()), SentimentReward)
    for fields in ({"direction": "neg"}, {"positive_label": "good"}):
        with pytest.raises(ConfigError, match="has one logit and no classes"):
            load_reward(args(reward_model=directory, **fields))
    rejected(["score", "w2", "--reward-model", directory], "score --prompt TEXT")
    with pytest.raises(LoadError, match="has 2 labels. The logit reward requires"):
        LogitReward("reel-sentiment")


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_run_is_rewarded_with_logit_of_prompt_and_response(directory, tmp_path, chat):
    base = tiny_chat(tmp_path / "base")
    settings = dict(preset="reel", base_model=str(base), reward_model=directory, device=DEVICE)
    settings |= dict(gen_len=6, batch_size=6, total_phases=1, prefix="w1 w2", chat=chat)
    trainer = RLHFTrainer(RLHFArgs(**settings, normalize_reward=False))
    rollout = trainer.rollout_phase()
    prompt = rollout.samples.prompt_texts(trainer.tokenizer)[0]
    for text, reward in zip(rollout.texts, rollout.raw_rewards.tolist(), strict=True):
        expected = logit_alone(directory, dialog("w1 w2", text.removeprefix(prompt).strip()))
        assert reward == pytest.approx(expected, abs=1e-5)
