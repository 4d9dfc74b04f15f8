"""References of exercises agree with the package."""

import dataclasses

import numpy as np
import pytest
import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.exercise import find_exercise
from rlhf_lab.course.exercises.ppo import ppo
from rlhf_lab.course.exercises.verifiable import best_policy, exact_match
from rlhf_lab.course.grading import Judge
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import sums
from rlhf_lab.rewards import SentimentReward


@pytest.mark.slow
def test_ppo_matches_the_trainer_in_every_phase(tmp_path):
    # on the CPU: other rounding could draw other tokens in one of the two implementations
    args = RLHFArgs(preset="reel", device="cpu", total_phases=6, batch_size=64, seed=2)
    policy = TransformerWithValueHead(load_model(args.base_model), seed=args.seed)
    rewards = ppo(args, policy, load_model(args.base_model), SentimentReward(args.reward_model))
    reports = RLHFTrainer(args, out=tmp_path / "run").train()
    assert rewards == pytest.approx([report.mean_reward for report in reports], abs=5e-7)
    assert rewards[-1] > rewards[0] + 0.1


@pytest.mark.slow
@pytest.mark.typed
def test_scoring_is_checked_where_shapes_are_checked() -> None:
    judge = Judge(find_exercise("model_solve_probability"))
    assert judge.verdict(lambda *arguments: 42.0).state == "differs"
    assert judge.verdict(judge.exercise.reference).state == "passed"


def test_check_raises_if_the_reference_raises() -> None:
    def observe(fn, **arguments):
        raise TypeError("pairs")

    broken = dataclasses.replace(find_exercise("best_policy"), observe=observe)
    with pytest.raises(RuntimeError, match="best_policy, beta = 1: TypeError: pairs"):
        Judge(broken).verdict(lambda p, beta: 42.0)


def test_exact_match_agrees_with_the_reward_on_edited_texts() -> None:
    rng, grammar = np.random.default_rng(0), sums.SumsGrammar()
    texts = grammar.sample(grammar.problems(400, rng), rng).texts()
    for i, text in enumerate(texts):
        words, at = text.split(" "), int(rng.integers(10, text.count(" ") + 1))
        edits = (lambda w, at: w, lambda w, at: w[:at], lambda w, at: w[:at] + w[at - 1 :])
        edits += (lambda w, at: w[:at] + ["#"] + w[at:], lambda w, at: [*w, "sure"])
        texts[i] = " ".join(edits[i % len(edits)](words, at))
    expected = sums.SUMS_REWARDS["sums:exact"](texts)
    assert 0.1 < expected.mean() < 0.9
    assert torch.equal(exact_match(texts), expected)


def test_best_policy_is_the_exact_optimum_of_the_grammar() -> None:
    grammar = sums.SumsGrammar()
    problems = grammar.problems(200, np.random.default_rng(0))
    p = torch.from_numpy(sums.solve_probability(grammar, problems))
    cells = sums.outcomes(grammar, problems)
    for point in sums.sums_frontier(cells, lambda x: x.right * 1.0, (2.0, 0.3)):
        accuracy, kl = best_policy(p, point.beta)
        assert abs(accuracy.mean() - point.true_reward) < 1e-10
        assert abs(kl.mean() - point.kl_per_sequence) < 1e-10
