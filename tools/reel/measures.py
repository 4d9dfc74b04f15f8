"""Measures of a bundled model against the grammar: a writer's KL, a classifier's accuracy."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.graph import GraphPolicy, state_values
from rlhf_lab.organism.lexicon import BOS, WORD_IDS
from rlhf_lab.organism.rewards import Reward, read_features, true_reward
from rlhf_lab.organism.tokenizer import load_tokenizer


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    standard_error: float


class ClassifierFigures(NamedTuple):
    """How a classifier compares with the exact posterior on fresh reviews."""

    accuracy: float
    bayes_accuracy: float
    mean_gap: float


def _estimate(values: Float[Tensor, " batch"]) -> Estimate:
    """Give the mean of values and the standard error of that mean."""
    return Estimate(float(values.mean()), float(values.std() / len(values) ** 0.5))


def next_probs(
    policy: GraphPolicy, tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq vocab"]:
    """Give a policy's exact distribution of the token behind every position, in float64.

    Raises ValueError for an ungrammatical prefix or one with nothing behind it.
    """
    index, mask = policy.graph.walk(tokens)
    if tokens.shape[1] >= policy.graph.grammar.seq_len or not mask.all():
        raise ValueError(
            f"tokens has {int((~mask.all(axis=1)).sum())} ungrammatical rows and "
            f"{tokens.shape[1]} columns; give grammatical prefixes without <eos>."
        )
    columns = [policy.probability[t][index[:, t]] for t in range(tokens.shape[1])]
    return torch.from_numpy(np.stack(columns, axis=1))


def token_advantages(
    policy: GraphPolicy, reward: Reward, tokens: Int[Tensor, "batch seq"]
) -> tuple[Float[Tensor, "batch gen"], Bool[Tensor, "batch gen"]]:
    """Give the exact advantage of every token behind <bos>, V(s_t+1) - V(s_t), where it is defined.

    With a reward at the end and no discount the sum over a review is reward - V(<bos>).
    Equation: Sutton & Barto 2018, section 13.5, with exact values.
    """
    values, mask = state_values(policy, reward, tokens)
    keep = mask[:, 1:]
    return torch.where(keep, values[:, 1:] - values[:, :-1], 0.0), keep


def language_model_kl(
    model: torch.nn.Module, reference: GraphPolicy, tokens: Int[Tensor, "batch seq"]
) -> Estimate:
    """Estimate KL(grammar || model) in nats per review, exactly at every prefix.

    1. At every position, sum p log(p / q) over the vocabulary, with the grammar's own p.
    2. Sum over positions; average over reviews that the grammar wrote.
    """
    prefix = tokens[:, :-1]
    with torch.no_grad():
        log_q = torch.cat([model(part).logits for part in prefix.split(512)]).double()
    log_q = log_q.log_softmax(dim=-1)
    p = next_probs(reference, prefix)
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(dim=-1)
    return _estimate(kl.sum(dim=-1))


def sample_language_model(
    model: torch.nn.Module, n: int, n_tokens: int, seed: int
) -> Int[Tensor, "batch seq"]:
    """Draw n sequences of n_tokens from a model at temperature 1, beginning with <bos>."""
    generator = torch.Generator().manual_seed(seed)
    tokens, cache = torch.full((n, 1), WORD_IDS[BOS]), None
    with torch.no_grad():
        for _ in range(n_tokens - 1):
            out = model(tokens[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            drawn = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


def grammatical_share(model: torch.nn.Module, reference: GraphPolicy, n: int, seed: int) -> float:
    """Give the share of a model's samples at temperature 1 that are whole reviews."""
    grammar = reference.graph.grammar
    tokens = sample_language_model(model, n, grammar.seq_len, seed)
    _, mask = reference.graph.walk(tokens)
    return float(mask[:, -1].mean())


def bayes_accuracy(reference: GraphPolicy) -> float:
    """Give the accuracy that no classifier of reviews can beat, by exact enumeration.

    E[max(P(+ | review), P(- | review))] under the grammar.
    """
    posterior = true_reward.score(reference.graph.final_features())
    return reference.mean(np.maximum(posterior, 1 - posterior))


def positive_probability(
    model: torch.nn.Module, directory: Path, texts: list[str]
) -> Float[Tensor, " batch"]:
    """Score texts as a user would: tokenizer, padding, truncation, softmax."""
    tokenizer = load_tokenizer(directory)
    parts = []
    with torch.no_grad():
        for start in range(0, len(texts), 512):
            batch = texts[start : start + 512]
            encoded = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            parts.append(model(**encoded).logits.softmax(dim=-1)[:, 1])
    return torch.cat(parts)


def classifier_figures(
    predicted: Float[Tensor, " batch"], texts: list[str], reference: GraphPolicy
) -> ClassifierFigures:
    """Compare a classifier's P(positive) with the exact posterior of the same reviews.

    1. A review whose predicted side is not the posterior's costs |2 P(positive | review) - 1|;
       accuracy is the Bayes limit less the mean cost. Its expectation is that of held-out accuracy,
       without the noise of the labels.
    2. mean_gap is the mean of |predicted - P(positive | review)|.
    """
    found = predicted.double().numpy()
    truth = true_reward.score(read_features(texts, reference.graph.grammar))
    limit = bayes_accuracy(reference)
    cost = np.where((found > 0.5) == (truth > 0.5), 0.0, np.abs(2 * truth - 1))
    return ClassifierFigures(
        accuracy=limit - float(cost.mean()),
        bayes_accuracy=limit,
        mean_gap=float(np.abs(found - truth).mean()),
    )
