"""The two halves of a PPO phase as plain functions, which lesson 06 has learners write.

The trainer's own do the same, and announce every moment on the way.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch.nn.utils import clip_grad_norm_

from rlhf_lab.functional import compute_returns
from rlhf_lab.models import compare_with_reference
from rlhf_lab.rewards import score_texts
from rlhf_lab.sampling import sample
from rlhf_lab.training import (
    LearningStats,
    ObjectiveTerms,
    ReplayMemory,
    ReplayMinibatch,
    RLHFTrainer,
    Rollout,
    objective_terms,
)
from rlhf_lab.training.objective import furthest_ratio, minibatch_stats
from rlhf_lab.training.trainer import phase_generator


def rollout_phase(trainer: RLHFTrainer) -> Rollout:
    """Sample a batch, score it, and compute everything that learning needs.

    1. `sample` as many continuations of `trainer.prompt` as the batch has, by
       `trainer.sampling_spec` and the "sampling" stream of this phase (`phase_generator`).
    2. Let `trainer.reward_fn` score the texts (`score_texts`): raw rewards.
    3. Normalise them with `trainer.functions.normalize_reward`, if `args.normalize_reward`.
    4. Compare policy and reference (`compare_with_reference`), a minibatch's size at a time.
    5. Let `trainer.functions.estimate_advantages` make advantages of the rewards of step 3, and add
       the values for the returns (`compute_returns`).
    6. Put it all in a `Rollout`. Its gold_rewards and grammatical stay None.
    """
    args, functions = trainer.args, trainer.functions
    generator = phase_generator(args.seed, trainer.phase, "sampling", trainer.device)
    prompts = [trainer.prompt] * args.batch_size
    samples = sample(trainer.policy, prompts, trainer.sampling_spec, generator)
    texts = samples.texts(trainer.tokenizer)
    raw_rewards = score_texts(trainer.reward_fn, texts).to(trainer.device)
    rewards = functions.normalize_reward(raw_rewards) if args.normalize_reward else raw_rewards
    model, reference = trainer.policy.base_model, trainer.reference
    kl, entropy, ref_residuals = compare_with_reference(
        model, reference, samples, args.temperature, args.minibatch_size
    )
    advantages = functions.estimate_advantages(args, samples.values, rewards, samples.mask)
    return Rollout(
        samples=samples,
        texts=texts,
        raw_rewards=raw_rewards,
        rewards=rewards,
        gold_rewards=None,
        grammatical=None,
        kl=kl,
        entropy=entropy,
        ref_residuals=ref_residuals,
        advantages=advantages,
        returns=compute_returns(advantages, samples.values, samples.mask),
    )


class Step(NamedTuple):
    """One optimiser step: its minibatch, the terms before it, and the gradient's norm."""

    minibatch: ReplayMinibatch
    terms: ObjectiveTerms
    grad_norm: float


def learning_phase(trainer: RLHFTrainer, rollout: Rollout) -> LearningStats:
    """Improve the policy on a rollout.

    1. Make a `ReplayMemory` that deals the rollout out in `args.num_minibatches`, as often as
       `args.batches_per_learning_phase` says, with the "minibatches" stream of this phase
       (`phase_generator`, on the CPU).
    2. For each minibatch, compute its `objective_terms` with `trainer.functions`.
    3. Clear the gradients, and take that of the objective.
    4. Scale it down to a norm of `args.max_grad_norm` at most (`clip_grad_norm_`, which returns the
       norm that it found); step the optimiser.
    5. After the last minibatch, step the schedule.
    6. Return the `learning_stats` of all `Step`s.
    """
    args = trainer.args
    memory = ReplayMemory(rollout, args.num_minibatches, args.batches_per_learning_phase)
    steps = []
    for minibatch in memory.get_minibatches(
        phase_generator(args.seed, trainer.phase, "minibatches")
    ):
        terms = objective_terms(
            trainer.policy, trainer.reference, minibatch, args, trainer.functions
        )
        trainer.optimizer.zero_grad()
        terms.objective.backward()
        grad_norm = clip_grad_norm_(trainer.policy.parameters(), args.max_grad_norm)
        trainer.optimizer.step()
        steps.append(Step(minibatch, terms, grad_norm.item()))
    trainer.scheduler.step()
    return learning_stats(steps, args.clip_coef)


def learning_stats(steps: Sequence[Step], clip_coef: float) -> LearningStats:
    """Sum a learning phase up.

    1. Take the mean over the steps of each term, of the clip fraction, of the k3 estimate of
       KL(old policy || policy), and of the gradient's norm.
    2. Of the first step, take the ratio that is furthest from 1.
    """
    stats = [minibatch_stats(s.terms, s.minibatch, s.grad_norm, clip_coef) for s in steps]
    means = {name: sum(s[name].item() for s in stats) / len(stats) for name in stats[0]}
    first = furthest_ratio(steps[0].terms, steps[0].minibatch).item()
    return LearningStats(ratio_first_minibatch=first, **means)
