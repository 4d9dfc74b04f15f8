"""Measures of a bundled model against the grammar: KL of a language model, classifier accuracy."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.organism.graph import GraphPolicy
from rlhf_lab.organism.lexicon import BOS, WORD_IDS
from rlhf_lab.organism.rewards import read_features, true_reward


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    standard_error: float


class ClassifierMetrics(NamedTuple):
    """Comparison of a classifier with the exact posterior on fresh reviews."""

    accuracy: float
    bayes_accuracy: float
    mean_gap: float


def next_probs(
    policy: GraphPolicy, tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq vocab"]:
    """Return a policy's exact next-token distribution at every position of grammatical prefixes."""
    index, mask = policy.graph.walk(tokens)
    assert mask.all(), "tokens has ungrammatical rows"
    columns = [policy.probability[t][index[:, t]] for t in range(tokens.shape[1])]
    return torch.from_numpy(np.stack(columns, axis=1))


@torch.no_grad()
def language_model_kl(
    model: torch.nn.Module, reference: GraphPolicy, tokens: Int[Tensor, "batch seq"]
) -> Estimate:
    """Estimate KL(grammar || model) in nats per review, over reviews of the grammar.

    KL = sum_t sum_v p_t(v) log(p_t(v) / q_t(v)), exact at every prefix.
    """
    prefix = tokens[:, :-1]
    logits = torch.cat([model(part).logits for part in prefix.split(512)]).double()
    p = next_probs(reference, prefix)
    kl = (torch.special.xlogy(p, p) - p * logits.log_softmax(-1)).sum((1, 2))
    return Estimate(kl.mean().item(), (kl.std() / len(kl) ** 0.5).item())


@torch.no_grad()
def sample_language_model(
    model: torch.nn.Module, n: int, n_tokens: int, seed: int
) -> Int[Tensor, "batch seq"]:
    """Sample n sequences of n_tokens at temperature 1, starting with <bos>."""
    generator = torch.Generator().manual_seed(seed)
    tokens, cache = torch.full((n, 1), WORD_IDS[BOS]), None
    for _ in range(n_tokens - 1):
        out = model(tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        drawn = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


def grammatical_fraction(
    model: torch.nn.Module, reference: GraphPolicy, n: int, seed: int
) -> float:
    """Return the fraction of a model's samples that are complete reviews."""
    tokens = sample_language_model(model, n, reference.graph.grammar.seq_len, seed)
    _, mask = reference.graph.walk(tokens)
    return float(mask[:, -1].mean())


def bayes_accuracy(reference: GraphPolicy) -> float:
    """Compute the best possible accuracy, E[max(P(+ | review), P(- | review))], exactly."""
    posterior = true_reward.score(reference.graph.final_features())
    return reference.mean(np.maximum(posterior, 1 - posterior))


def classifier_metrics(
    predicted: Float[Tensor, " batch"], texts: list[str], reference: GraphPolicy
) -> ClassifierMetrics:
    """Compare a classifier's P(positive) with the exact posterior of the same reviews.

    A wrong side costs |2 P(positive | review) - 1|; accuracy is the Bayes limit minus the mean
    cost: the expectation of held-out accuracy, without the noise of the labels.
    """
    found = predicted.double().numpy()
    exact = true_reward.score(read_features(texts, reference.graph.grammar))
    limit = bayes_accuracy(reference)
    cost = np.where((found > 0.5) == (exact > 0.5), 0.0, np.abs(2 * exact - 1))
    gap = float(np.abs(found - exact).mean())
    return ClassifierMetrics(limit - float(cost.mean()), limit, gap)
