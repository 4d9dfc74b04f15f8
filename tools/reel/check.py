"""Checks of the bundled Reel models against the grammar, with bounds."""

from typing import NamedTuple

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from rlhf_lab.organism import Grammar, GraphPolicy, build_graph, grammar_policy, weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS
from rlhf_lab.rewards import SentimentReward
from tools.reel.measures import classifier_metrics, grammatical_fraction, language_model_kl

KL_BOUND = 0.08
GRAMMATICAL_BOUND = 0.98
ACCURACY_MARGIN = 0.01
GAP_BOUND = 0.01


class Check(NamedTuple):
    """A value, its bound as text, and True if it meets the bound."""

    name: str
    value: float
    bound: str
    ok: bool


def _at_most(name: str, value: float, bound: float) -> Check:
    return Check(name, value, f"<= {bound:g}", value <= bound)


def _at_least(name: str, value: float, bound: float) -> Check:
    return Check(name, value, f">= {bound:.4g}", value >= bound)


def _language_model(name: str, reference: GraphPolicy, n: int, seed: int) -> list[Check]:
    model = GPT2LMHeadModel.from_pretrained(str(weights_dir(name)), local_files_only=True).eval()
    reviews = reference.graph.grammar.sample(n, np.random.default_rng(seed))
    kl = language_model_kl(model, reference, torch.from_numpy(reviews.tokens))
    fraction = grammatical_fraction(model, reference, n, seed)
    upper = kl.mean + 2 * kl.standard_error
    return [
        _at_most(f"{name}: KL(grammar || model), nats per review", kl.mean, KL_BOUND),
        _at_most(f"{name}: that KL + 2 standard errors", upper, KL_BOUND),
        _at_least(f"{name}: grammatical fraction of samples", fraction, GRAMMATICAL_BOUND),
    ]


def _classifier(reference: GraphPolicy, n: int, seed: int) -> list[Check]:
    name = "reel-sentiment"
    texts = reference.graph.grammar.sample(n, np.random.default_rng(seed)).texts()
    found = classifier_metrics(SentimentReward(name)(texts), texts, reference)
    least = found.bayes_accuracy - ACCURACY_MARGIN
    return [
        _at_least(f"{name}: accuracy on fresh reviews", found.accuracy, least),
        _at_most(f"{name}: mean |P - posterior|", found.mean_gap, GAP_BOUND),
    ]


def run_checks(n_reviews: int = 4000, seed: int = 1234) -> list[Check]:
    """Measure every bundled model on fresh reviews."""
    if n_reviews < 20:
        raise ValueError(f"n_reviews is {n_reviews}. Use 20 or more for a standard error.")
    reference = grammar_policy(build_graph(Grammar()))
    checks = [
        check
        for name in LANGUAGE_MODELS
        for check in _language_model(name, reference, n_reviews, seed)
    ]
    return checks + _classifier(reference, n_reviews, seed)
