"""Training of the bundled models: GPT-2-shaped language models and a sentiment classifier.

Shapes and tokenizers come from the shipped directories. The recipe was fixed before any model was
inspected, and a seed is never picked: if a model misses a bound of `tools.reel check`, the
recipe changes. The quality of the text hardly depends on the seed; the result of a probe does,
which is why three language models are bundled.
"""

import shutil
from pathlib import Path
from types import MappingProxyType

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
)

from rlhf_lab.organism import Grammar, weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS, SUMS_MODELS
from rlhf_lab.organism.sums import SumsGrammar
from rlhf_lab.supervised import fit

CLASSIFIER = "reel-sentiment"
SEEDS = MappingProxyType(
    dict(zip(LANGUAGE_MODELS, range(3), strict=True))
    | {CLASSIFIER: 0}
    | dict(zip(SUMS_MODELS, (0, 1, 2, 0), strict=True))
)
LEARNING_RATE = 4e-3


def sums_grammar(name: str) -> SumsGrammar:
    """Return the grammar that a bundled model of sums is trained on."""
    return SumsGrammar(unreachable=name.endswith("unreachable"))


def language_model_loss(
    model: GPT2LMHeadModel, grammar: Grammar, batch_size: int, rng: np.random.Generator
) -> Float[Tensor, ""]:
    """Compute the mean cross-entropy of the next word of fresh reviews, in nats per token."""
    tokens = torch.from_numpy(grammar.sample(batch_size, rng).tokens)
    return cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def sums_loss(
    model: GPT2LMHeadModel, grammar: SumsGrammar, batch_size: int, rng: np.random.Generator
) -> Float[Tensor, ""]:
    """Compute the mean cross-entropy of the responses to fresh sums, in nats per response token.

    Texts without steps are shorter, so they are run apart from those with steps.
    """
    texts = grammar.sample(grammar.problems(batch_size, rng), rng)
    tokens, mask = torch.from_numpy(texts.tokens), torch.from_numpy(texts.mask)
    has_steps, losses = mask.sum(1) > 2 * grammar.columns, []
    for rows in (has_steps, ~has_steps):
        if rows.any():
            end = int(mask[rows].any(0).nonzero().max()) + 1
            x, is_response = tokens[rows, :end], mask[rows, 1:end]
            logits = model(x[:, :-1]).logits[is_response]
            losses.append(cross_entropy(logits, x[:, 1:][is_response], reduction="sum"))
    return sum(losses) / mask.sum()


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


def train_model(name: str, directory: Path) -> None:
    """Train a bundled model on fresh texts of its language, and save it with its tokenizer."""
    seed, rng, grammar = SEEDS[name], np.random.default_rng(SEEDS[name]), Grammar()
    shape = weights_dir("-".join(name.split("-")[:2]))  # that of the first seed
    make, config = GPT2LMHeadModel, GPT2Config.from_pretrained(shape)
    loss, steps, batch_size = language_model_loss, 3600, 128
    if name == CLASSIFIER:
        make, config = DistilBertForSequenceClassification, DistilBertConfig.from_pretrained(shape)
        loss, steps, batch_size = classifier_loss, 900, 256
    elif name in SUMS_MODELS:
        loss, steps, grammar = sums_loss, 2200, sums_grammar(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, so that every machine gets the same weights
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make(config)
            step = lambda: loss(model, grammar, batch_size, rng)
            fit(model, step, steps, LEARNING_RATE, name, True)
    finally:
        torch.set_num_threads(threads)
    model.eval().save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shape / file, directory)
