"""The exercises of the lesson on PPO: one function against the trainer, and a look inside a run."""

import pytest
import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.exercise import find_exercise
from rlhf_lab.course.exercises.ppo import ppo
from rlhf_lab.course.grading import Judge
from rlhf_lab.diffing import logit_lens
from rlhf_lab.models import TransformerWithValueHead, load_model
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


def _look(trainer, reviews, hook_names, praise, blame, factor=1.0):
    seen = {name: [] for name in hook_names}

    @trainer.on("after_score")
    def read(ctx):
        with torch.no_grad():
            model = ctx.policy.base_model
            _, cache = model.run_with_cache(reviews)
            for name in hook_names:
                probs = logit_lens(model, cache[name][:, -1]).exp()
                good, bad = probs[:, praise].sum(1), probs[:, blame].sum(1)
                seen[name].append(factor * (good / (good + bad)).mean().item())

    return seen


@pytest.mark.slow
def test_look_by_another_way_passes_and_its_errors_are_shown():
    exercise = find_exercise("look")
    assert Judge(exercise).verdict(_look).state == "passed"
    failing = Judge(exercise).verdict(lambda trainer, **kw: _look(trainer, **kw, factor=None))
    assert "is switched off" in failing.difference.rows[0][1]
