"""Tests the bundled models against the exact grammar, on fresh reviews and fixed seeds."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2LMHeadModel

from rlhf_lab.organism import BUNDLED, Grammar, weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS
from rlhf_lab.rewards import SentimentReward
from tests.organism.oracles import entropy
from tools.reel.check import run_checks
from tools.reel.measures import (
    bayes_accuracy,
    classifier_metrics,
    grammatical_fraction,
    language_model_kl,
    next_probs,
    sample_language_model,
)


def load(name):
    return GPT2LMHeadModel.from_pretrained(str(weights_dir(name)), local_files_only=True).eval()


@pytest.fixture(scope="module")
def nano():
    return load("reel-nano")


@pytest.fixture(scope="module")
def sentiment():
    return AutoModelForSequenceClassification.from_pretrained(
        str(weights_dir("reel-sentiment")), local_files_only=True
    ).eval()


@pytest.fixture(scope="module")
def reviews():
    return Grammar().sample(1500, np.random.default_rng(2024))


def test_the_models_are_small_and_hold_no_pickle():
    files = [path for name in BUNDLED for path in weights_dir(name).iterdir()]
    assert sum(path.stat().st_size for path in files) < 2e6
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def test_weights_dir_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="'reel-huge'"):
        weights_dir("reel-huge")


def test_nano_has_the_stated_shape(nano):
    # 72*64 + 32*64 + 2*(12*64^2 + 13*64) + 2*64 = 4608 + 2048 + 99968 + 128, unembedding tied.
    assert sum(p.numel() for p in nano.parameters()) == 106_752
    assert {p.dtype for p in nano.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_is_close_to_the_grammar(name, reel, reviews):
    estimate = language_model_kl(load(name), reel, torch.from_numpy(reviews.tokens))
    assert 0 < estimate.mean < 0.08 - 4 * estimate.standard_error


def test_kl_is_zero_for_the_grammar_and_28_log_72_less_entropy_for_a_uniform_model(reel, reviews):
    class Table(torch.nn.Module):
        """Stand in for a language model: give the logits of a function of the tokens."""

        def __init__(self, logits_of):
            super().__init__()
            self.logits_of = logits_of

        def forward(self, tokens):
            return SimpleNamespace(logits=self.logits_of(tokens))

    tokens = torch.from_numpy(reviews.tokens)
    exact = language_model_kl(Table(lambda t: (next_probs(reel, t) + 1e-300).log()), reel, tokens)
    flat = language_model_kl(Table(lambda t: torch.zeros(*t.shape, 72)), reel, tokens)
    assert abs(exact.mean) < 1e-10
    # KL(p || uniform) summed over 28 tokens is 28 log 72 - H; H is exact, the mean is sampled.
    expected = 28 * np.log(72) - entropy(reel)
    assert abs(flat.mean - expected) < 4.5 * flat.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_writes_grammatical_reviews(name, reel):
    # .98 lies 5 standard errors (sqrt(.99 * .01 / 1000) = .003) below the measured .995.
    assert grammatical_fraction(load(name), reel, 1000, seed=3) >= 0.98


def test_the_language_models_are_three_and_not_one():
    weights = [load(name).transformer.wte.weight for name in LANGUAGE_MODELS]
    assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(weights, 2))


def test_samples_begin_with_bos_and_repeat_with_their_seed(nano):
    first, again, other = (sample_language_model(nano, 20, 12, seed) for seed in (1, 1, 2))
    assert first.shape == (20, 12)
    assert (first[:, 0] == 0).all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sampling_with_a_cache_follows_the_distribution_of_the_whole_prefix(nano):
    # Shares of "film" at position 2 against the model's own probability, within 4.5 sigma.
    tokens = sample_language_model(nano, 4000, 3, seed=5)
    with torch.no_grad():
        p = nano(torch.tensor([[0, 2]])).logits[0, -1].softmax(-1)[9].item()
    assert abs((tokens[:, 2] == 9).double().mean() - p) < 4.5 * (p * (1 - p) / 4000) ** 0.5


@pytest.mark.slow
def test_sentiment_is_within_a_point_of_the_bayes_limit(reel, reviews):
    texts = reviews.texts()
    predicted = SentimentReward("reel-sentiment")(texts)
    figures = classifier_metrics(predicted, texts, reel)
    assert figures.bayes_accuracy == bayes_accuracy(reel)
    assert figures.bayes_accuracy - 0.01 <= figures.accuracy <= figures.bayes_accuracy
    assert figures.mean_gap < 0.01
    # Against the labels themselves: 4.5 standard errors of a share of .958 in 1500 are .023.
    truth = torch.from_numpy(reviews.latents.sentiment > 0)
    held_out = ((predicted > 0.5) == truth).double().mean()
    assert abs(float(held_out) - figures.accuracy) < 0.024


def test_classifier_figures_are_those_worked_by_hand(reel):
    # Posteriors 4913/4916 and 3/4916; the second is called positive at .9, which costs
    # |2 * 3/4916 - 1| = 4910/4916, halved over two reviews; gaps: 3/4916 and .9 - 3/4916.
    good = "this film wow , " + " and ".join(["the plot was so good"] * 3) + " . i loved it . bye"
    bad = good.replace("good", "bad").replace("loved", "hated")
    figures = classifier_metrics(torch.tensor([1.0, 0.9]).double(), [good, bad], reel)
    assert figures.accuracy == pytest.approx(figures.bayes_accuracy - 4910 / 4916 / 2)
    assert figures.mean_gap == pytest.approx(0.45)


def test_sentiment_reads_padded_text_as_it_reads_it_alone(sentiment, reviews):
    directory = weights_dir("reel-sentiment")
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    text = reviews.texts()[0]
    with torch.no_grad():
        alone = sentiment(**tokenizer(text, return_tensors="pt")).logits[0]
        batch = tokenizer([text, text + " " + text], padding=True, return_tensors="pt")
        padded = sentiment(**batch).logits[0]
    assert (alone - padded).abs().max() < 1e-4
    assert sentiment.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}


@pytest.mark.slow
def test_every_check_passes_on_the_bundled_models():
    checks = run_checks(n_reviews=600)
    assert [check.name for check in checks if not check.ok] == []
    assert len({check.name for check in checks}) == len(checks) == 11


def test_checks_refuse_too_few_reviews():
    with pytest.raises(ValueError, match="n_reviews is 19"):
        run_checks(n_reviews=19)
