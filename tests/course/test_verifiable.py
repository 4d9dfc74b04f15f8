"""The references of the exercises on verifiable rewards agree with the package."""

import numpy as np
import torch

from rlhf_lab.course.exercises.verifiable import best_policy, exact_match
from rlhf_lab.organism.sums import (
    SUMS_REWARDS,
    SumsGrammar,
    outcomes,
    solve_probability,
    sums_frontier,
)


def test_exact_match_agrees_with_the_reward_on_edited_texts() -> None:
    rng = np.random.default_rng(0)
    grammar = SumsGrammar()
    texts = grammar.sample(grammar.problems(400, rng), rng).texts()
    for i, text in enumerate(texts):
        words, at = text.split(" "), int(rng.integers(10, text.count(" ") + 1))
        edits = (lambda w, at: w, lambda w, at: w[:at], lambda w, at: w[:at] + w[at - 1 :])
        edits += (lambda w, at: w[:at] + ["#"] + w[at:], lambda w, at: [*w, "sure"])
        texts[i] = " ".join(edits[i % len(edits)](words, at))
    expected = SUMS_REWARDS["sums:exact"](texts)
    assert 0.1 < expected.mean() < 0.9
    assert torch.equal(exact_match(texts), expected)


def test_best_policy_is_the_exact_optimum_of_the_grammar() -> None:
    grammar = SumsGrammar()
    problems = grammar.problems(200, np.random.default_rng(0))
    p = torch.from_numpy(solve_probability(grammar, problems))
    for point in sums_frontier(outcomes(grammar, problems), lambda x: x.right * 1.0, (2.0, 0.3)):
        accuracy, kl = best_policy(p, point.beta)
        assert abs(accuracy.mean() - point.true_reward) < 1e-10
        assert abs(kl.mean() - point.kl_per_sequence) < 1e-10
