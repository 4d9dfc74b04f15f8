"""Training of the bundled models: GPT-2-shaped language models and a sentiment classifier.

Shapes and tokenizers come from the shipped directories. The recipe was fixed before any model was
inspected, and a seed is never picked: if a model misses a bound of `tools.reel check`, the
recipe changes. The quality of the text hardly depends on the seed; the result of a probe does,
which is why three language models are bundled.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from rlhf_lab.organism import Grammar, weights_dir
from rlhf_lab.supervised import fit

LANGUAGE_MODEL_SEEDS = MappingProxyType({"reel-nano": 0, "reel-nano-b": 1, "reel-nano-c": 2})
LEARNING_RATE = 4e-3


class Trained(NamedTuple):
    """A trained model, its directory, and its loss at every step in nats."""

    model: torch.nn.Module
    directory: Path
    losses: Float[Tensor, " step"]


def language_model_loss(
    model: GPT2LMHeadModel, grammar: Grammar, batch_size: int, rng: np.random.Generator
) -> Float[Tensor, ""]:
    """Compute the mean cross-entropy of the next word of fresh reviews, in nats per token."""
    tokens = torch.from_numpy(grammar.sample(batch_size, rng).tokens)
    return cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def classifier_loss(
    model: DistilBertForSequenceClassification,
    grammar: Grammar,
    batch_size: int,
    rng: np.random.Generator,
) -> Float[Tensor, ""]:
    """Compute the mean cross-entropy of the sentiment of fresh reviews, in nats per review."""
    reviews = grammar.sample(batch_size, rng)
    labels = torch.from_numpy((reviews.latents.sentiment > 0).astype(np.int64))
    return cross_entropy(model(torch.from_numpy(reviews.tokens)).logits, labels)


def train_language_model(
    out_dir: Path,
    grammar: Grammar | None = None,
    steps: int = 3600,
    batch_size: int = 128,
    seed: int = 0,
    title: str | None = "reel-nano",
) -> Trained:
    """Train a language model on fresh reviews, and save it with its tokenizer."""
    config = GPT2Config.from_pretrained(weights_dir("reel-nano"))
    make, loss = lambda: GPT2LMHeadModel(config), language_model_loss
    return _train(out_dir, make, loss, grammar, steps, batch_size, seed, title, "reel-nano")


def train_classifier(
    out_dir: Path,
    grammar: Grammar | None = None,
    steps: int = 900,
    batch_size: int = 256,
    seed: int = 0,
    title: str | None = "reel-sentiment",
) -> Trained:
    """Train reel-sentiment on the latent sentiment of fresh reviews, and save it."""
    config = DistilBertConfig.from_pretrained(weights_dir("reel-sentiment"))
    make, loss = lambda: DistilBertForSequenceClassification(config), classifier_loss
    return _train(out_dir, make, loss, grammar, steps, batch_size, seed, title, "reel-sentiment")


def _train(
    directory: Path,
    make_model: Callable[[], PreTrainedModel],
    loss: Callable[..., Float[Tensor, ""]],
    grammar: Grammar | None,
    steps: int,
    batch_size: int,
    seed: int,
    title: str | None,
    shipped: str,
) -> Trained:
    rng, grammar = np.random.default_rng(seed), grammar or Grammar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, so that every machine gets the same weights
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model()
            step = lambda: loss(model, grammar, batch_size, rng)
            losses = fit(model, step, steps, LEARNING_RATE, title or "", title is not None)
    finally:
        torch.set_num_threads(threads)
    model.eval().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights_dir(shipped) / name, directory)
    return Trained(model, directory, losses)


def rebuild(out_dir: Path) -> dict[str, Trained]:
    """Train all bundled models with the default settings into folders of out_dir."""
    language_models = {
        name: train_language_model(out_dir / name, seed=seed, title=name)
        for name, seed in LANGUAGE_MODEL_SEEDS.items()
    }
    return {**language_models, "reel-sentiment": train_classifier(out_dir / "reel-sentiment")}
