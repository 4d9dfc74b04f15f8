"""Tests the two trainers on runs of a few steps."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from rlhf_lab.organism import BUNDLED, Grammar, weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS
from tools.reel.train import (
    LANGUAGE_MODEL_SEEDS,
    Trained,
    language_model_loss,
    rebuild,
    train_classifier,
    train_language_model,
)

TRAINERS = {"writer": train_language_model, "classifier": train_classifier}
LOADERS = {"writer": GPT2LMHeadModel, "classifier": AutoModelForSequenceClassification}


def run(kind, directory, steps=20, seed=0):
    return TRAINERS[kind](directory, steps=steps, batch_size=16, seed=seed, title=None)


@pytest.fixture(scope="module", params=list(TRAINERS))
def trained(request, tmp_path_factory):
    return request.param, run(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
def test_same_seed_same_losses_and_weights(trained, tmp_path):
    kind, first = trained
    second, other = run(kind, tmp_path / "a"), run(kind, tmp_path / "b", steps=2, seed=1)
    assert torch.equal(first.losses, second.losses)
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name])
    assert first.losses[0] != other.losses[0]


@pytest.mark.slow
def test_language_model_starts_near_chance_and_learns_the_template(tmp_path):
    # Chance is log 72 = 4.28 nats; knowing only the slots gives well under 2.
    losses = run("writer", tmp_path, steps=40).losses
    assert losses.shape == (40,)
    assert 4.0 < losses[0] < 5.5
    assert losses[-5:].mean() < 0.6 * losses[:5].mean()


@pytest.mark.slow
def test_classifier_starts_near_chance_and_learns_the_words(tmp_path):
    # Chance is log 2 = .693 nats.
    losses = train_classifier(tmp_path, Grammar(n_clauses=1), 60, 32, title=None).losses
    assert 0.5 < losses[0] < 1.2
    assert losses[-10:].mean() < 0.8 * losses[:10].mean()


def test_saved_directory_loads_to_the_same_function_and_holds_no_pickle(trained):
    kind, result = trained
    names = {path.name for path in result.directory.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert {name.rsplit(".", 1)[-1] for name in names} == {"json", "safetensors"}
    again = LOADERS[kind].from_pretrained(str(result.directory), local_files_only=True).eval()
    tokens = torch.tensor([[0, 2, 8, 13, 4]])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, result.model(tokens).logits)


def test_saved_configs_name_context_and_labels(tmp_path):
    run("writer", tmp_path / "writer", steps=1)
    run("classifier", tmp_path / "classifier", steps=1)
    writer = json.loads((tmp_path / "writer/config.json").read_text())
    classifier = json.loads((tmp_path / "classifier/config.json").read_text())
    assert (writer["n_ctx"], writer["n_positions"], writer["vocab_size"]) == (32, 32, 72)
    assert (writer["activation_function"], writer["dtype"]) == ("gelu_new", "float32")
    assert classifier["id2label"] == {"0": "NEGATIVE", "1": "POSITIVE"}


def test_training_leaves_the_random_state_of_the_caller_alone(tmp_path):
    before = torch.random.get_rng_state()
    run("writer", tmp_path, steps=1)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_the_number_of_threads_changes_no_weight_and_comes_back(tmp_path):
    # With two threads, two steps of this batch size give other sums than with one.
    threads = torch.get_num_threads()
    weights = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            trained = train_language_model(tmp_path, steps=2, title=None)
            assert torch.get_num_threads() == count
            weights.append(list(trained.model.state_dict().values()))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*weights, strict=True))


def test_the_loss_is_the_mean_surprise_of_the_next_word():
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(weights_dir("reel-nano")))
    tokens = torch.from_numpy(Grammar().sample(3, np.random.default_rng(0)).tokens)
    log_probs = model(tokens).logits.log_softmax(-1)
    surprises = [
        -log_probs[review, t, tokens[review, t + 1]].item()
        for review in range(3)
        for t in range(tokens.shape[1] - 1)
    ]
    loss = language_model_loss(model, Grammar(), 3, np.random.default_rng(0))
    assert loss.item() == pytest.approx(sum(surprises) / len(surprises), rel=1e-5)


def test_the_three_seeds_are_the_first_three():
    assert list(LANGUAGE_MODEL_SEEDS.items()) == list(zip(LANGUAGE_MODELS, range(3), strict=True))


def test_rebuild_trains_each_into_its_folder_from_its_seed(tmp_path, monkeypatch):
    calls = []

    def stand_in(directory, **settings):
        calls.append((directory.name, settings))
        return Trained(torch.nn.Linear(1, 1), directory, torch.zeros(1))

    for name in ("train_language_model", "train_classifier"):
        monkeypatch.setattr(f"tools.reel.train.{name}", stand_in)
    assert set(rebuild(tmp_path)) == set(BUNDLED)
    of_language_models = [
        (name, {"seed": seed, "title": name}) for seed, name in enumerate(LANGUAGE_MODELS)
    ]
    assert calls == [*of_language_models, ("reel-sentiment", {})]
