"""Training of the bundled models: GPT-2-shaped language models and a sentiment classifier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.lexicon import EOS, VOCABULARY, WORD_IDS
from rlhf_lab.supervised import fit
from tools.reel.tokenizers import PAD, UNK, save_classifier_tokenizer, save_language_model_tokenizer

LANGUAGE_MODEL_SEEDS = MappingProxyType({"reel-nano": 0, "reel-nano-b": 1, "reel-nano-c": 2})
"""The seed of each bundled language model: the first three, none left out."""


class Trained(NamedTuple):
    """A trained model, where it was saved, and its loss at every step in nats."""

    model: torch.nn.Module
    directory: Path
    losses: Float[Tensor, " step"]


def language_model_config() -> GPT2Config:
    """Give the shape of reel-nano: 2 layers, width 64, 4 heads, context 32, no dropout."""
    return GPT2Config(
        vocab_size=len(VOCABULARY),
        n_positions=32,
        n_ctx=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.05,
        bos_token_id=WORD_IDS["<bos>"],
        eos_token_id=WORD_IDS[EOS],
        pad_token_id=WORD_IDS[EOS],
    )


def classifier_config() -> DistilBertConfig:
    """Give the shape of reel-sentiment: a DistilBERT of 2 layers, width 64, 4 heads, no dropout."""
    words = (*VOCABULARY, PAD, UNK)
    return DistilBertConfig(
        vocab_size=len(words),
        max_position_embeddings=64,
        n_layers=2,
        n_heads=4,
        dim=64,
        hidden_dim=256,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        initializer_range=0.05,
        pad_token_id=words.index(PAD),
        bos_token_id=None,
        eos_token_id=None,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )


def language_model_loss(
    model: GPT2LMHeadModel, grammar: Grammar, batch_size: int, rng: np.random.Generator
) -> Float[Tensor, ""]:
    """Give the mean cross-entropy of the next word of fresh reviews, in nats per token."""
    tokens = torch.from_numpy(grammar.sample(batch_size, rng).tokens)
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train_language_model(
    out_dir: Path,
    grammar: Grammar | None = None,
    steps: int = 3600,
    batch_size: int = 128,
    learning_rate: float = 4e-3,
    seed: int = LANGUAGE_MODEL_SEEDS["reel-nano"],
    title: str | None = "reel-nano",
) -> Trained:
    """Train a language model on reviews that are sampled afresh at every step, and save it.

    1. Fix the seeds; the caller's random state is left as it was.
    2. Minimise the cross-entropy of the next word.
    3. Save weights, config and tokenizer as a Hugging Face directory.

    The recipe was fixed before anything was read out of a model, and a seed is never picked: if a
    bound of `tools.reel check` is missed, the recipe changes. How well the text is modelled hardly
    depends on the seed; what a probe finds inside does, which is why three are bundled.

    Args:
        title: what the progress bar is called; none is shown when None.

    Raises ValueError for steps or batch_size below 1.
    """
    return _train(
        Path(out_dir),
        lambda: GPT2LMHeadModel(language_model_config()),
        language_model_loss,
        save_language_model_tokenizer,
        grammar or Grammar(),
        steps,
        batch_size,
        learning_rate,
        seed,
        title,
    )


def classifier_loss(
    model: DistilBertForSequenceClassification,
    grammar: Grammar,
    batch_size: int,
    rng: np.random.Generator,
) -> Float[Tensor, ""]:
    """Give the mean cross-entropy of the sentiment of fresh reviews, in nats per review."""
    reviews = grammar.sample(batch_size, rng)
    labels = torch.from_numpy((reviews.latents.sentiment > 0).astype(np.int64))
    logits = model(torch.from_numpy(reviews.tokens)).logits
    return torch.nn.functional.cross_entropy(logits, labels)


def train_classifier(
    out_dir: Path,
    grammar: Grammar | None = None,
    steps: int = 900,
    batch_size: int = 256,
    learning_rate: float = 4e-3,
    seed: int = 0,
    title: str | None = "reel-sentiment",
) -> Trained:
    """Train reel-sentiment on reviews labelled with their latent sentiment, and save it.

    1. Fix the seeds; the caller's random state is left as it was.
    2. Minimise the cross-entropy of the label. A review's ids are what the saved tokenizer makes
       of its text: <bos>, the words, <eos>.
    3. Save weights, config and tokenizer as a Hugging Face directory.

    Raises ValueError for steps or batch_size below 1.
    """
    return _train(
        Path(out_dir),
        lambda: DistilBertForSequenceClassification(classifier_config()),
        classifier_loss,
        save_classifier_tokenizer,
        grammar or Grammar(),
        steps,
        batch_size,
        learning_rate,
        seed,
        title,
    )


def _train(
    directory: Path,
    make_model: Callable[[], PreTrainedModel],
    loss: Callable[..., Float[Tensor, ""]],
    save_tokenizer: Callable[[Path], None],
    grammar: Grammar,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    title: str | None,
) -> Trained:
    """Make a model, fit it to fresh reviews, save it with its tokenizer."""
    _check_positive(steps=steps, batch_size=batch_size)
    rng = np.random.default_rng(seed)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
        losses = fit(
            model,
            lambda: loss(model, grammar, batch_size, rng),
            steps,
            learning_rate,
            title or "",
            title is not None,
        )
    model.eval().save_pretrained(directory)
    save_tokenizer(directory)
    return Trained(model, directory, losses)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Add up in one order, whatever the machine's number of threads: the same weights come out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rebuild(out_dir: Path) -> dict[str, Trained]:
    """Train all bundled models with the default settings into folders of out_dir."""
    out_dir = Path(out_dir)
    language_models = {
        name: train_language_model(out_dir / name, seed=seed, title=name)
        for name, seed in LANGUAGE_MODEL_SEEDS.items()
    }
    return {**language_models, "reel-sentiment": train_classifier(out_dir / "reel-sentiment")}


def _check_positive(**numbers: int) -> None:
    """Refuse a number below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; give a whole number of 1 or more.")
