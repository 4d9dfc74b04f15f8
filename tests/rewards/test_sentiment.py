"""Tests the sentiment reward on tiny random classifiers, against one plain pass per text."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.rewards import SentimentReward, sentiment_reward
from rlhf_lab.rewards.sentiment import _positive_class
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts

SHORT, MIDDLE = "w1 w7", "w4 w4 w2 w13 w9"
LONG = "w3 w5 w8 w0 w11 w17 w2 w2 w19 w6 w10 w4 w1"
LABELS = ("NEGATIVE", "POSITIVE")


def classifier(labels, **changes):
    shape = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 24}
    names = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    settings = shape | {"max_position_embeddings": 20, "pad_token_id": 3} | names | changes
    return DistilBertForSequenceClassification(DistilBertConfig(**settings))


@pytest.fixture
def make_classifier(tmp_path, llama_tokenizer, randomize_weights, save_model):
    """Writes a random classifier with these labels and gives its directory."""

    def build(labels=LABELS, name="classifier", dtype=torch.float32, **changes):
        model = classifier(labels, **changes)
        randomize_weights(model, 4)
        return str(save_model(model.to(dtype), llama_tokenizer, tmp_path / name))

    return build


def probability_alone(directory, text, index, dtype=torch.float64):
    """One text, no padding, in double precision: exp z_i / sum_j exp z_j."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=dtype).eval()
    ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    with torch.no_grad():
        weights = model(torch.tensor([ids])).logits[0].exp()
    return (weights[index] / weights.sum()).item()


def test_a_score_is_the_softmax_of_the_rewarded_class(make_classifier, no_network):
    directory = make_classifier()
    texts = [SHORT, MIDDLE, LONG]
    scores = SentimentReward(directory)(texts)
    expected = [probability_alone(directory, text, 1) for text in texts]
    assert max(expected) - min(expected) > 0.01
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_score_does_not_depend_on_the_other_texts(make_classifier):
    """Without its attention mask the short text would be read with ten padding tokens."""
    reward = SentimentReward(make_classifier())
    alone = torch.cat([reward([text]) for text in (SHORT, LONG, MIDDLE)])
    torch.testing.assert_close(reward([SHORT, LONG, MIDDLE]), alone, atol=1e-6, rtol=0)
    ids = reward.tokenizer([SHORT, LONG], padding=True, return_tensors="pt").input_ids
    with torch.no_grad():
        unmasked = reward.model(ids, attention_mask=torch.ones_like(ids)).logits.softmax(-1)[0, 1]
    assert (unmasked - alone[0]).abs() > 1e-3, "the mask has to matter for this model"


def test_the_free_function_gives_either_class_without_gradients_cut_where_it_is_told(
    make_classifier,
):
    reward = SentimentReward(make_classifier())
    reward.model.requires_grad_(True)
    texts, parts = [LONG, SHORT], (reward.tokenizer, reward.model)
    positive, negative = (sentiment_reward(texts, *parts, k, 20) for k in (1, 0))
    torch.testing.assert_close(positive, reward(texts))
    torch.testing.assert_close(positive + negative, torch.ones(2))
    assert not positive.requires_grad
    cut = sentiment_reward(texts, *parts, 1, max_length=3)
    first_ids = torch.tensor([reward.tokenizer(LONG)["input_ids"][:3]])
    with torch.no_grad():
        by_hand = reward.model(first_ids).logits.softmax(-1)[:, 1]
    torch.testing.assert_close(cut[:1], by_hand)
    assert (cut[:1] - positive[:1]).abs() > 1e-3, "the rest of the text has to matter"


def test_a_half_precision_file_runs_in_float32(make_classifier):
    directory = make_classifier(dtype=torch.float16)
    stored = load_file(f"{directory}/model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    reward = SentimentReward(directory)
    assert {parameter.dtype for parameter in reward.model.parameters()} == {torch.float32}
    scores = reward([SHORT, LONG])
    assert scores.dtype == torch.float32
    expected = [probability_alone(directory, text, 1) for text in (SHORT, LONG)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)


def test_scores_near_one_stay_apart(make_classifier):
    """Half precision near 1 has steps of 4.9e-4, so these texts would all score alike."""
    directory = make_classifier(dtype=torch.float16)
    reward = SentimentReward(directory)
    with torch.no_grad():
        reward.model.classifier.weight.mul_(0.002)
        reward.model.classifier.bias.copy_(torch.tensor([0.0, 7.0]))
    scores = reward([SHORT, MIDDLE, LONG])
    assert scores.min() > 0.999 and scores.unique().numel() == 3
    assert scores.half().unique().numel() == 1


def test_the_directions_add_up_to_one(make_classifier):
    directory = make_classifier()
    pos = SentimentReward(directory, "pos")([SHORT, LONG])
    neg = SentimentReward(directory, "neg")([SHORT, LONG])
    torch.testing.assert_close(pos + neg, torch.ones(2), atol=1e-6, rtol=0)
    assert (pos - neg).abs().min() > 1e-3


@pytest.mark.parametrize("direction", ["positive", "Pos", ""])
def test_unknown_direction_raises_before_loading(direction, no_network):
    with pytest.raises(ConfigError, match=f"direction='{direction}'"):
        SentimentReward("nobody/no-such-classifier", direction)


@pytest.mark.parametrize(
    ("labels", "label", "positive"),
    [
        (("NEGATIVE", "POSITIVE"), None, 1),
        (("POSITIVE", "NEGATIVE"), None, 0),
        (("neg", "pos"), None, 1),
        (("LABEL_0", "LABEL_1"), None, 1),
        (("LABEL_1", "LABEL_0"), None, 0),
        (("Positive sentiment", "Negative sentiment"), None, 0),
        ((" positive", "negative "), None, 0),
        (("positivo", "negativo"), None, 0),
        (("NEG", "POS_CLASS"), None, 1),
        (("negative", "not negative"), None, 1),
        (("good", "bad"), "good", 0),
        (("bad", "Good "), " gOOD", 1),
        (("positive", "negative"), "negative", 1),
    ],
    ids=str,
)
def test_positive_class_is_found_by_names(labels, label, positive):
    assert _positive_class(dict(enumerate(labels)), label, "model") == positive


@pytest.mark.parametrize(
    ("labels", "label"),
    [
        (("good", "bad"), None),
        (("good", "negative"), None),
        (("neutral", "negative"), None),
        (("very negative", "negative"), None),
        (("", " "), None),
        (("positive", "positively bad"), None),
        (("negation", "position"), None),
        (("1 star", "5 stars"), None),
        (("good", "bad"), "goods"),
        (("good", "bad"), ""),
        (("good", "bad"), "LABEL_1"),
    ],
    ids=str,
)
def test_classes_whose_names_do_not_tell_are_not_guessed(labels, label):
    with pytest.raises(ConfigError, match="positive_label") as caught:
        _positive_class(dict(enumerate(labels)), label, "model")
    assert all(repr(name) in str(caught.value) for name in labels)


@pytest.mark.parametrize(
    ("labels", "positive"), [(("POSITIVE", "NEGATIVE"), 0), (("LABEL_0", "LABEL_1"), 1)]
)
def test_reward_is_probability_of_positive_class(make_classifier, labels, positive):
    directory = make_classifier(labels)
    expected = probability_alone(directory, LONG, positive)
    assert SentimentReward(directory, "pos")([LONG]).item() == pytest.approx(expected, abs=1e-6)
    against = SentimentReward(directory, "neg")
    assert against([LONG]).item() == pytest.approx(1 - expected, abs=1e-6)
    assert repr(labels[1 - positive]) in against.summary()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"0": "negative", "5": "positive"}}, "id2label"),
        ({"label2id": {"POSITIVE": 0, "NEGATIVE": 1}}, "label2id"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 2}, "names 3 classes"),
    ],
)
def test_inconsistent_classes_raise(make_classifier, changes, words):
    directory = make_classifier()
    change_settings(directory, **changes)
    with pytest.raises(LoadError, match=words):
        SentimentReward(directory)


def change_settings(directory, file="config.json", **changes):
    path = Path(directory, file)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_classifier_without_a_padding_token_is_refused(make_classifier):
    directory = make_classifier()
    change_settings(directory, "tokenizer_config.json", pad_token=None)
    with pytest.raises(LoadError, match="no padding token.*pad_token in tokenizer_config"):
        SentimentReward(directory)


def test_a_decoder_whose_configuration_lacks_the_padding_token_takes_its_tokenizers(
    tmp_path, llama_tokenizer, randomize_weights, save_model
):
    """Transformers refuses batches of several texts without it."""
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 24, "n_positions": 20}
    model = GPT2ForSequenceClassification(GPT2Config(**shape, id2label=dict(enumerate(LABELS))))
    randomize_weights(model, 4)
    directory = str(save_model(model, llama_tokenizer, tmp_path / "decoder"))
    assert model.config.pad_token_id is None and llama_tokenizer.pad_token_id is not None
    reward = SentimentReward(directory)
    alone = torch.cat([reward([text]) for text in (SHORT, LONG)])
    torch.testing.assert_close(reward([SHORT, LONG]), alone, atol=1e-6, rtol=0)
    assert alone[0].item() == pytest.approx(probability_alone(directory, SHORT, 1), abs=1e-6)


def test_a_classifier_with_fewer_embeddings_than_tokens_is_refused(make_classifier):
    with pytest.raises(LoadError, match="the model has 20 embeddings"):
        SentimentReward(make_classifier(vocab_size=20))


@pytest.mark.parametrize("n_classes", [1, 3, 5])
def test_a_classifier_of_other_than_two_classes_is_refused(make_classifier, n_classes):
    directory = make_classifier([f"class_{i}" for i in range(n_classes)])
    with pytest.raises(LoadError, match=f"{n_classes} classes") as caught:
        SentimentReward(directory)
    assert directory in str(caught.value)


def test_a_text_that_is_too_long_is_cut_to_what_the_model_can_read(make_classifier):
    """20 positions: what follows the twentieth token cannot change the score."""
    reward = SentimentReward(make_classifier())
    words = [f"w{i % 20}" for i in range(500)]
    cut, shorter = " ".join(words[:20]), " ".join(words[:19])
    scores = reward([" ".join(words), cut, shorter])
    torch.testing.assert_close(scores[0], scores[1], atol=1e-6, rtol=0)
    assert (scores[0] - scores[2]).abs() > 1e-5


def test_a_roberta_keeps_clear_of_the_two_positions_it_reserves(
    tmp_path, llama_tokenizer, randomize_weights, save_model
):
    """RoBERTa counts positions from pad_token_id + 1, so 24 of them hold 20 tokens here."""
    config = RobertaConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        pad_token_id=3,
        id2label=dict(enumerate(LABELS)),
    )
    model = RobertaForSequenceClassification(config)
    randomize_weights(model, 4)
    directory = str(save_model(model, llama_tokenizer, tmp_path / "roberta"))
    words = [f"w{i % 20}" for i in range(100)]
    long, cut = SentimentReward(directory)([" ".join(words), " ".join(words[:20])])
    assert long == pytest.approx(cut.item(), abs=1e-6)


@pytest.mark.parametrize("texts", [[""], ["", "this movie was great ."]])
def test_an_empty_text_scores_like_any_other(texts, no_network):
    scores = SentimentReward("reel-sentiment")(texts)
    assert scores.isfinite().all() and scores.shape == (len(texts),)


def test_batches_gradients_and_random_state_do_not_matter(make_classifier):
    directory, texts = make_classifier(dropout=0.5, seq_classif_dropout=0.5), (SHORT, LONG, MIDDLE)
    reward, before = SentimentReward(directory), torch.get_rng_state()
    with torch.enable_grad():
        scores = reward(texts)
    assert not scores.requires_grad and torch.equal(torch.get_rng_state(), before)
    for batch_size in (1, 2):
        other = SentimentReward(directory, batch_size=batch_size)(list(texts))
        torch.testing.assert_close(other, scores, atol=1e-6, rtol=0)
    assert reward([]).shape == (0,)


def test_a_language_model_is_refused_as_a_classifier(no_network):
    """Transformers would put a random classification head on it and reward noise."""
    with pytest.raises(LoadError, match="reel-nano"):
        SentimentReward("reel-nano")


def test_a_classifier_without_its_tokenizer_is_refused(make_classifier, tmp_path):
    directory = tmp_path / "bare"
    shutil.copytree(make_classifier(), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(LoadError, match="tokenizer"):
        SentimentReward(str(directory))


def test_samples_reach_the_classifier_without_bos_and_padding(no_network):
    """The seed scored "<|endoftext|>This is ...": here no word of the text is a special token."""
    policy = TransformerWithValueHead(load_model("reel-nano"))
    tokenizer = policy.base_model.tokenizer
    prompts = tokenize_prompts(tokenizer, ["this movie"] * 6, prepend_bos=True)
    generator = torch.Generator().manual_seed(0)
    samples = sample(policy, prompts, SamplingSpec(28, stop_at_eos=True), generator)
    texts = samples.texts(tokenizer)
    words = {word for text in texts for word in text.split()}
    assert (samples.tokens == tokenizer.bos_token_id).any() and not samples.mask.all()
    assert words.isdisjoint({tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token})
    reward = SentimentReward("reel-sentiment")
    alone = torch.cat([reward([text]) for text in texts])
    torch.testing.assert_close(reward(texts), alone, atol=1e-6, rtol=0)


def test_minilm_tells_a_good_review_from_a_bad_one(real_models, no_network):
    good = "This movie was absolutely wonderful, I loved every minute of it."
    bad = "This movie was terrible, a boring and stupid waste of time."
    directory = str(real_models / "minilm-sentiment")
    scores = SentimentReward(directory)([good, bad])
    assert scores[0] > 0.9 and scores[1] < 0.1
    against = SentimentReward(directory, "neg")([good, bad])
    torch.testing.assert_close(scores + against, torch.ones(2), atol=1e-6, rtol=0)


def test_minilm_reads_a_text_alone_and_among_long_ones_alike(real_models, no_network):
    reward = SentimentReward(str(real_models / "minilm-sentiment"))
    short, long = "Not bad.", "I liked the story, and the actors were fine. " * 20
    together = reward([short, long])
    torch.testing.assert_close(together[:1], reward([short]), atol=1e-4, rtol=0)
    batch = reward.tokenizer([short, long], padding=True, return_tensors="pt")
    with torch.no_grad():
        ids = batch.input_ids[:, :512]
        unmasked = reward.model(ids, torch.ones_like(ids)).logits.softmax(-1)[0, 1]
    assert (unmasked - together[0]).abs() > 1e-2
