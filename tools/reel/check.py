"""Verification of Reel: identities of the exact solver, and the quality of the bundled models."""

from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, GPT2LMHeadModel

from rlhf_lab.organism import (
    frontier,
    optimal_policy,
    state_values,
    token_information,
)
from rlhf_lab.organism.bundled import LANGUAGE_MODELS, weights_dir
from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.graph import GraphPolicy, build_graph, grammar_policy
from rlhf_lab.organism.lexicon import VOCABULARY
from rlhf_lab.organism.rewards import read_features, smoothed_popcorn, true_reward
from tools.reel.enumeration import positive_by_enumeration
from tools.reel.measures import (
    classifier_figures,
    grammatical_share,
    language_model_kl,
    positive_probability,
    token_advantages,
)

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


def _at_most(name: str, value: float, bound: float) -> Check:
    return Check(name, float(value), f"<= {bound:g}", bool(value <= bound))


def _at_least(name: str, value: float, bound: float) -> Check:
    return Check(name, float(value), f">= {bound:.4g}", bool(value >= bound))


def identity_checks(reference: GraphPolicy, n_reviews: int, seed: int) -> list[Check]:
    """Check what has to hold to rounding, on fresh reviews and on the whole grammar."""
    graph = reference.graph
    reviews = graph.grammar.sample(n_reviews, np.random.default_rng(seed))
    tokens = torch.from_numpy(reviews.tokens)
    values, _ = state_values(reference, true_reward, tokens)
    words = [[VOCABULARY[i] for i in row] for row in reviews.tokens]
    enumerated = np.stack([positive_by_enumeration(row, graph.grammar)[0] for row in words])
    advantages, _ = token_advantages(reference, true_reward, tokens)
    rewards = torch.from_numpy(true_reward.score(read_features(reviews.texts(), graph.grammar)))
    telescoped = advantages.sum(dim=1) - (rewards - values[:, 0])
    sums = max(abs(p.sum(axis=1) - 1).max() for p in reference.probability)
    posterior = true_reward.score(graph.final_features())
    variance = reference.mean(posterior**2) - reference.mean(posterior) ** 2
    information = abs(float(token_information(reference, true_reward).sum()) - variance)
    gap = abs(values.numpy() - enumerated).max()
    return [
        _at_most("vocabulary, words off 72", abs(len(set(VOCABULARY)) - 72.0), 0.0),
        _at_most("next-token probabilities, error of their sums", sums, IDENTITY_BOUND),
        _at_most("V_ref under true reward - P(positive | prefix)", gap, IDENTITY_BOUND),
        _at_most(
            "advantages telescope to r - V(s_0)", float(abs(telescoped).max()), IDENTITY_BOUND
        ),
        _at_most("token information sums to Var(r)", information, IDENTITY_BOUND),
    ]


def frontier_checks(reference: GraphPolicy) -> list[Check]:
    """Check the exact optima: the duality of reward and KL, and the fall of the true reward."""
    features = reference.graph.final_features()
    beta = 0.1
    policy = optimal_policy(reference, smoothed_popcorn, beta)
    score = smoothed_popcorn.score(features)
    log_normalizer = np.log(reference.mean(np.exp(score / beta)))
    kl = float(policy.kl_by_position(reference).sum())
    duality = abs(kl - (policy.mean(score) / beta - log_normalizer))
    mild, greedy = frontier(reference, smoothed_popcorn, (0.1, 0.03))
    return [
        _at_most("optimum: KL - (E[r] / beta - log Z)", duality, IDENTITY_BOUND),
        _at_least("smoothed_popcorn: proxy gain, beta .1 to .03", greedy.proxy - mild.proxy, 0.05),
        _at_most(
            "smoothed_popcorn: true reward gain, beta .1 to .03",
            greedy.true_reward - mild.true_reward,
            -0.05,
        ),
    ]


def language_model_checks(
    name: str, reference: GraphPolicy, n_reviews: int, seed: int
) -> list[Check]:
    """Check a bundled language model against the grammar."""
    directory = str(weights_dir(name))
    model = GPT2LMHeadModel.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    ).eval()
    reviews = reference.graph.grammar.sample(n_reviews, np.random.default_rng(seed))
    kl = language_model_kl(model, reference, torch.from_numpy(reviews.tokens))
    share = grammatical_share(model, reference, n_reviews, seed)
    upper = kl.mean + 2 * kl.standard_error
    return [
        _at_most(f"{name}: KL(grammar || model), nats per review", kl.mean, KL_BOUND),
        _at_most(f"{name}: that KL + 2 standard errors", upper, KL_BOUND),
        _at_least(f"{name}: grammatical share of samples", share, GRAMMATICAL_BOUND),
    ]


def classifier_checks(reference: GraphPolicy, n_reviews: int, seed: int) -> list[Check]:
    """Check the bundled classifier against the exact posterior."""
    directory = weights_dir("reel-sentiment")
    classifier = AutoModelForSequenceClassification.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    ).eval()
    texts = reference.graph.grammar.sample(n_reviews, np.random.default_rng(seed)).texts()
    predicted = positive_probability(classifier, directory, texts)
    figures = classifier_figures(predicted, texts, reference)
    return [
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
    checks = identity_checks(reference, n_reviews // 20, seed) + frontier_checks(reference)
    for name in LANGUAGE_MODELS:
        checks += language_model_checks(name, reference, n_reviews, seed)
    return checks + classifier_checks(reference, n_reviews, seed)
