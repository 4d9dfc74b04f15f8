"""Verification of Reel: identities of the exact solver, and the quality of the bundled models."""

from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForSequenceClassification, GPT2LMHeadModel

from rlhf_lab.organism.bundled import BUNDLED, weights_dir
from rlhf_lab.organism.exact import (
    GraphPolicy,
    build_graph,
    frontier,
    grammar_policy,
    optimal_policy,
    state_values,
    token_advantages,
    token_information,
)
from rlhf_lab.organism.grammar import (
    ADVERBS,
    BOS,
    OPENERS,
    P_FLIP,
    P_NEGATION,
    P_OWN_ADVERB,
    P_POLARITY,
    P_TAGS,
    P_TIER,
    P_VERDICT,
    SENSE_OF_ADJECTIVE,
    SENSE_OF_VERB,
    STYLE_OF_OPENER,
    TAGS,
    VOCABULARY,
    WORD_IDS,
    Grammar,
)
from rlhf_lab.organism.rewards import gold, read_features, soft_popcorn
from rlhf_lab.organism.tokenizer import load_tokenizer

KL_BOUND = 0.08
GRAMMATICAL_BOUND = 0.98
ACCURACY_MARGIN = 0.01
GAP_BOUND = 0.01
IDENTITY_BOUND = 1e-10


class Check(NamedTuple):
    """One figure, the bound that it has to meet (in words), and whether it does."""

    name: str
    value: float
    bound: str
    ok: bool


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    standard_error: float


class ClassifierFigures(NamedTuple):
    """How a classifier compares with the exact posterior on fresh reviews."""

    accuracy: float
    bayes_accuracy: float
    mean_gap: float


def _at_most(name: str, value: float, bound: float) -> Check:
    return Check(name, float(value), f"<= {bound:g}", bool(value <= bound))


def _at_least(name: str, value: float, bound: float) -> Check:
    return Check(name, float(value), f">= {bound:.4g}", bool(value >= bound))


def _estimate(values: Float[Tensor, " batch"]) -> Estimate:
    """Give the mean of values and the standard error of that mean."""
    return Estimate(float(values.mean()), float(values.std() / len(values) ** 0.5))


def positive_by_enumeration(
    words: list[str], grammar: Grammar
) -> tuple[Float[np.ndarray, " seq"], Float[np.ndarray, " seq"]]:
    """Give P(y=+ | prefix) and P(prefix) for every prefix, without any state.

    1. List all combinations of sentiment, intensity, style and clause polarities, with their prior.
    2. Multiply each by the probability of every word given that combination.
    3. Compare the weight of y=+ with the whole.
    """
    hidden = product((1, -1), range(3), range(3), *[(1, -1)] * grammar.n_clauses)
    rows = [(y, i, r, polarity) for y, i, r, *polarity in hidden]
    weight = np.array(
        [np.prod([_equal(p, y, P_POLARITY) for p in polarity]) / 18 for y, _, _, polarity in rows]
    )
    positive = np.array([y > 0 for y, *_ in rows])
    share, total = [], []
    for t, word in enumerate(words):
        likelihood = [_word_probability(word, t, words, row, grammar) for row in rows]
        weight = weight * np.array(likelihood)
        total.append(weight.sum())
        share.append(weight[positive].sum() / weight.sum())
    return np.array(share), np.array(total)


def _equal(sign: int, truth: int, probability: float) -> float:
    return probability if sign == truth else 1 - probability


def _word_probability(
    word: str, t: int, words: list[str], row: tuple[int, int, int, list[int]], grammar: Grammar
) -> float:
    """Give P(word at position t | latents, words before)."""
    y, i, r, polarity = row
    name, k, choices = grammar.slots[t]
    if name == "OPEN":
        return (STYLE_OF_OPENER[word] == r) / len(OPENERS[r])
    if name == "COP":
        return P_NEGATION if word == "wasn't" else 1 - P_NEGATION
    if name == "ADV":
        return P_OWN_ADVERB / 2 if word in ADVERBS[r] else (1 - P_OWN_ADVERB) / 4
    if name == "ADJ":
        sign, tier = SENSE_OF_ADJECTIVE[word]
        negation = -1 if words[t - 2] == "wasn't" else 1
        graded = P_TIER if tier == i else (1 - P_TIER) / 2
        return (sign == negation * polarity[k]) * graded / 4
    if name == "CONN":
        expected = "and" if polarity[k] == polarity[k - 1] else "but"
        return 1 - P_FLIP if word == expected else P_FLIP
    if name == "VERB":
        sign, tier = SENSE_OF_VERB[word]
        return _equal(sign, y, P_VERDICT) * (P_TIER if tier == i else (1 - P_TIER) / 2)
    if name == "TAG":
        return P_TAGS[TAGS.index(word)]
    return 1 / len(choices)


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
    p = reference.next_probs(prefix)
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
    posterior = gold.score(reference.graph.final_features())
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
    truth = gold.score(read_features(texts, reference.graph.grammar))
    limit = bayes_accuracy(reference)
    cost = np.where((found > 0.5) == (truth > 0.5), 0.0, np.abs(2 * truth - 1))
    return ClassifierFigures(
        accuracy=limit - float(cost.mean()),
        bayes_accuracy=limit,
        mean_gap=float(np.abs(found - truth).mean()),
    )


def identity_checks(reference: GraphPolicy, n_reviews: int, seed: int) -> list[Check]:
    """Check what has to hold to rounding, on fresh reviews and on the whole grammar."""
    graph = reference.graph
    reviews = graph.grammar.sample(n_reviews, np.random.default_rng(seed))
    tokens = torch.from_numpy(reviews.tokens)
    values, _ = state_values(reference, gold, tokens)
    words = [[VOCABULARY[i] for i in row] for row in reviews.tokens]
    enumerated = np.stack([positive_by_enumeration(row, graph.grammar)[0] for row in words])
    advantages, _ = token_advantages(reference, gold, tokens)
    rewards = torch.from_numpy(gold.score(read_features(reviews.texts(), graph.grammar)))
    telescoped = advantages.sum(dim=1) - (rewards - values[:, 0])
    sums = max(abs(p.sum(axis=1) - 1).max() for p in reference.probability)
    posterior = gold.score(graph.final_features())
    variance = reference.mean(posterior**2) - reference.mean(posterior) ** 2
    information = abs(float(token_information(reference, gold).sum()) - variance)
    gap = abs(values.numpy() - enumerated).max()
    return [
        _at_most("vocabulary, words off 72", abs(len(set(VOCABULARY)) - 72.0), 0.0),
        _at_most("next-token probabilities, error of their sums", sums, IDENTITY_BOUND),
        _at_most("V_ref under gold - P(positive | prefix)", gap, IDENTITY_BOUND),
        _at_most(
            "advantages telescope to r - V(s_0)", float(abs(telescoped).max()), IDENTITY_BOUND
        ),
        _at_most("token information sums to Var(r)", information, IDENTITY_BOUND),
    ]


def frontier_checks(reference: GraphPolicy) -> list[Check]:
    """Check the exact optima: the duality of reward and KL, and the Goodhart fall of gold."""
    features = reference.graph.final_features()
    beta = 0.1
    policy = optimal_policy(reference, soft_popcorn, beta)
    score = soft_popcorn.score(features)
    log_normalizer = np.log(reference.mean(np.exp(score / beta)))
    kl = float(policy.kl_by_position(reference).sum())
    duality = abs(kl - (policy.mean(score) / beta - log_normalizer))
    mild, greedy = frontier(reference, soft_popcorn, (0.1, 0.03))
    return [
        _at_most("optimum: KL - (E[r] / beta - log Z)", duality, IDENTITY_BOUND),
        _at_least("soft_popcorn: proxy gain, beta .1 to .03", greedy.proxy - mild.proxy, 0.05),
        _at_most("soft_popcorn: gold gain, beta .1 to .03", greedy.gold - mild.gold, -0.05),
    ]


def model_checks(reference: GraphPolicy, n_reviews: int, seed: int) -> list[Check]:
    """Check the bundled models against the grammar."""
    nano, sentiment = (weights_dir(name) for name in BUNDLED)
    model = GPT2LMHeadModel.from_pretrained(str(nano), local_files_only=True).eval()
    reviews = reference.graph.grammar.sample(n_reviews, np.random.default_rng(seed))
    kl = language_model_kl(model, reference, torch.from_numpy(reviews.tokens))
    share = grammatical_share(model, reference, n_reviews, seed)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        str(sentiment), local_files_only=True
    ).eval()
    texts = reviews.texts()
    predicted = positive_probability(classifier, sentiment, texts)
    figures = classifier_figures(predicted, texts, reference)
    upper = kl.mean + 2 * kl.standard_error
    return [
        _at_most("reel-nano: KL(grammar || model), nats per review", kl.mean, KL_BOUND),
        _at_most("reel-nano: that KL + 2 standard errors", upper, KL_BOUND),
        _at_least("reel-nano: grammatical share of samples", share, GRAMMATICAL_BOUND),
        _at_least(
            "reel-sentiment: accuracy on fresh reviews",
            figures.accuracy,
            figures.bayes_accuracy - ACCURACY_MARGIN,
        ),
        _at_most("reel-sentiment: mean |P - posterior|", figures.mean_gap, GAP_BOUND),
    ]


def run_checks(n_reviews: int = 4000, seed: int = 1234) -> list[Check]:
    """Run every check of the organism.

    1. Solve the grammar.
    2. Check the identities (on a share of the reviews: they are exact), then the models.

    Raises ValueError for n_reviews below 20.
    """
    if n_reviews < 20:
        raise ValueError(f"n_reviews is {n_reviews}; give 20 or more for a standard error.")
    reference = grammar_policy(build_graph(Grammar()))
    return [
        *identity_checks(reference, n_reviews // 20, seed),
        *frontier_checks(reference),
        *model_checks(reference, n_reviews, seed),
    ]
