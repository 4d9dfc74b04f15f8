"""Checks of the bundled models against their grammars: KL, samples and accuracy, with bounds."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GPT2LMHeadModel

from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import Grammar, GraphPolicy, build_graph, grammar_policy, weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS, SUMS_MODELS
from rlhf_lab.organism.lexicon import BOS, WORD_IDS
from rlhf_lab.organism.rewards import read_features, true_reward
from rlhf_lab.organism.sums import model_solve_probability, solve_probability, trace
from rlhf_lab.rewards import SentimentReward
from tools.reel.train import sums_grammar

KL_BOUND, SUMS_KL_BOUND = 0.08, 0.03
GRAMMATICAL_BOUND = 0.98
ACCURACY_MARGIN, GAP_BOUND = 0.01, 0.01


class Check(NamedTuple):
    """A value, its bound as text, and True if it meets the bound."""

    name: str
    value: float
    bound: str
    ok: bool


def next_probs(
    policy: GraphPolicy, tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq vocab"]:
    """Return a policy's exact next-token distribution at every position of grammatical prefixes."""
    index, mask = policy.graph.walk(tokens)
    assert mask.all(), "tokens has ungrammatical rows"
    columns = [policy.probability[t][index[:, t]] for t in range(tokens.shape[1])]
    return torch.from_numpy(np.stack(columns, axis=1))


@torch.no_grad()
def _kl_checks(
    name: str,
    model: torch.nn.Module,
    prefix: Int[Tensor, "batch seq"],
    p: Float[Tensor, "batch predicted vocab"],
    bound: float,
) -> list[Check]:
    """Estimate KL(grammar || model) in nats per text, over texts of the grammar.

    p is the grammar's distribution of the word after each of the last positions of the prefixes;
    all 0 at positions that do not count.

    KL = sum_t sum_v p_t(v) log(p_t(v) / q_t(v)), exact at every prefix.
    """
    logits = torch.cat([model(part).logits for part in prefix.split(512)]).double()
    logprobs = logits[:, -p.shape[1] :].log_softmax(-1)
    kl = (torch.special.xlogy(p, p) - p * logprobs).sum((1, 2))
    mean, standard_error = kl.mean().item(), kl.std().item() / len(kl) ** 0.5
    return [
        _at_most(f"{name}: KL(grammar || model), nats per text", mean, bound),
        _at_most(f"{name}: that KL + 2 standard errors", mean + 2 * standard_error, bound),
    ]


def bayes_accuracy(reference: GraphPolicy) -> float:
    """Compute the best possible accuracy, E[max(P(+ | review), P(- | review))], exactly."""
    posterior = true_reward.score(reference.graph.final_features())
    return reference.mean(np.maximum(posterior, 1 - posterior))


def _at_most(name: str, value: float, bound: float) -> Check:
    return Check(name, value, f"<= {bound:g}", value <= bound)


def _at_least(name: str, value: float, bound: float) -> Check:
    return Check(name, value, f">= {bound:.4g}", value >= bound)


def _load(name: str) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(str(weights_dir(name)), local_files_only=True).eval()


def _language_model(name: str, reference: GraphPolicy, n: int, seed: int) -> list[Check]:
    model, grammar = _load(name), reference.graph.grammar
    prefix = torch.from_numpy(grammar.sample(n, np.random.default_rng(seed)).tokens)[:, :-1]
    options = {"do_sample": True, "top_k": 0, "max_length": grammar.seq_len}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = torch.full((n, 1), WORD_IDS[BOS])
        samples = model.generate(start, attention_mask=torch.ones_like(start), **options)
    _, mask = reference.graph.walk(samples)  # True at the end of complete reviews
    fraction = float(mask[:, -1].mean())
    return [
        *_kl_checks(name, model, prefix, next_probs(reference, prefix), KL_BOUND),
        _at_least(f"{name}: grammatical fraction of samples", fraction, GRAMMATICAL_BOUND),
    ]


def _sums(name: str, n: int, seed: int) -> list[Check]:
    model, grammar, rng = _load(name), sums_grammar(name), np.random.default_rng(seed)
    texts = grammar.sample(grammar.problems(n, rng), rng)
    tokens, mask = torch.from_numpy(texts.tokens), torch.from_numpy(texts.mask)
    p = trace(grammar, tokens).next_probs * mask[:, grammar.prompt_len :, None]
    logits = lambda rows: model(rows).logits
    problems = grammar.problems(n // 10, rng)
    scored = model_solve_probability(logits, grammar, problems).numpy()
    exact = solve_probability(grammar, problems)
    rng = np.random.default_rng(seed)  # 400 sums for any n: a few of them have most of the mean
    hard = grammar.problems(400, rng, [grammar.columns], carry=True)
    long_carry = model_solve_probability(logits, grammar, hard).mean().item()
    low, high = (0.0, 0.01) if grammar.unreachable else (0.0001, 0.02)
    correlation = float(np.corrcoef(scored, exact)[0, 1])
    return [
        *_kl_checks(name, model, tokens[:, :-1], p, SUMS_KL_BOUND),
        _at_least(f"{name}: correlation of scored and exact pass@1", correlation, 0.99),
        _at_most(f"{name}: mean |scored - exact pass@1|", float(abs(scored - exact).mean()), 0.02),
        _at_least(f"{name}: scored pass@1, long with a carry", long_carry, low),
        _at_most(f"{name}: the same at most", long_carry, high),
    ]


def _classifier(reference: GraphPolicy, n: int, seed: int) -> list[Check]:
    """Compare P(positive) of the classifier with the exact posterior of the same reviews.

    A wrong side costs |2 P(positive | review) - 1|; accuracy is the Bayes limit minus the mean
    cost: the expectation of held-out accuracy, without the noise of the labels.
    """
    name, grammar = "reel-sentiment", reference.graph.grammar
    texts = grammar.sample(n, np.random.default_rng(seed)).texts()
    found = SentimentReward(name)(texts).double().numpy()
    exact = true_reward.score(read_features(texts, grammar))
    limit = bayes_accuracy(reference)
    cost = np.where((found > 0.5) == (exact > 0.5), 0.0, np.abs(2 * exact - 1))
    accuracy, gap = limit - float(cost.mean()), float(np.abs(found - exact).mean())
    return [
        _at_least(f"{name}: accuracy on fresh reviews", accuracy, limit - ACCURACY_MARGIN),
        _at_most(f"{name}: mean |P - posterior|", gap, GAP_BOUND),
    ]


def run_checks(n_reviews: int = 4000, seed: int = 1234) -> list[Check]:
    """Measure every bundled model on fresh texts."""
    if n_reviews < 20:
        raise ConfigError(f"n_reviews is {n_reviews}. Use 20 or more for a standard error.")
    reference = grammar_policy(build_graph(Grammar()))
    checks = [_language_model(name, reference, n_reviews, seed) for name in LANGUAGE_MODELS]
    checks += [_sums(name, n_reviews, seed) for name in SUMS_MODELS]
    return sum([*checks, _classifier(reference, n_reviews, seed)], [])
