"""Exercises of lesson 06 on the two phases of PPO: credit, scoring, rollout, learning."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.course.exercises.toys import toy_trainer
from rlhf_lab.samples import Samples
from rlhf_lab.training import LearningStats, RLHFTrainer, Rollout
from rlhf_lab.training.ppo import assign_credit, learning_phase, rollout_phase, score_samples
from rlhf_lab.training.random_streams import phase_generator

WHOLE_REVIEW = (
    "this movie wow , the plot was so solid and the music was so good and the script was so clever "
    ". i liked it ."
)


def _rollout_cases() -> tuple[Case, ...]:
    return (
        Case("ordinary", {}),
        Case("batch of 2, rewards as they are", {"batch_size": 2, "normalize_reward": False}),
        Case("in the second phase", {"phase": 1}),
        Case("cooler, and cut to the top 5", {"temperature": 0.7, "top_k": 5}),
        Case("texts that end early", {"prefix": WHOLE_REVIEW, "normalize_reward": False}),
    )


def _scoring_cases() -> tuple[Case, ...]:
    as_they_are = {"normalize_reward": False}
    return (
        *_rollout_cases(),
        Case(
            "rewards that are handed in",
            {"batch_size": 2, "raw_rewards": (3.0, -1.0), **as_they_are},
        ),
        Case("rewards pay for the KL", {"kl_in": "reward", "kl_coef": 0.7}),
        Case("the KL is estimated", {"kl_estimator": "k3"}),
        Case("rewards pay for an estimated KL", {"kl_in": "reward", "kl_estimator": "k1"}),
        Case("greedy answers are the baseline", {"advantages": "remax", **as_they_are}),
    )


def _credit_cases() -> tuple[Case, ...]:
    return (
        Case("ordinary", {}),
        Case(
            "one step ahead, rewards whitened", {"advantages": "one_step", "whiten_rewards": True}
        ),
        Case("texts that end early", {"prefix": WHOLE_REVIEW}),
        Case("rewards pay for the KL", {"kl_in": "reward", "kl_coef": 0.7}),
        Case("answers are compared", {"advantages": "rloo", "samples_per_prompt": 2}),
        Case("greedy answers are the baseline", {"advantages": "remax", "normalize_reward": False}),
    )


def _samples_of(trainer: RLHFTrainer) -> Samples:
    """What the trainer's policy writes in its phase."""
    generator = phase_generator(trainer.args.seed, trainer.phase, "sampling")
    return trainer.sample(trainer.next_prompts(), generator)


def _observe_rollout(roll_out: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a rollout of a trainer holds."""
    return _facts(roll_out(toy_trainer(**arguments)))


def _observe_scoring(score: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a rollout made of finished samples holds."""
    fields = {name: value for name, value in arguments.items() if name != "raw_rewards"}
    trainer = toy_trainer(**fields)
    given = arguments.get("raw_rewards")
    raw = () if given is None else (torch.tensor(given),)
    return _facts(score(trainer, _samples_of(trainer), *raw))


def _facts(rollout: Any) -> dict[str, Any]:
    if not isinstance(rollout, Rollout):
        return {"returned": type(rollout).__name__}
    names = ("raw_rewards", "rewards", "kl", "entropy", "ref_residuals", "advantages", "returns")
    estimated = {} if rollout.ref_logprobs is None else {"ref_logprobs": rollout.ref_logprobs}
    return {
        "returned": "Rollout",
        "tokens": rollout.samples.tokens,
        "mask": rollout.samples.mask,
        "texts": rollout.texts,
        **{name: getattr(rollout, name).detach() for name in names},
        **estimated,
    }


def _observe_credit(assign: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Advantages and returns of a batch with rewards 0, 1, 2, ... and a KL of 0.1 per token.

    Greedy answers earn 0.5.

    The controller has left the coefficient that the run began with.
    """
    trainer = toy_trainer(**arguments)
    trainer.kl_controller.kl_coef *= 1.5
    samples = _samples_of(trainer)
    rewards = torch.arange(len(samples.tokens), dtype=torch.float32)
    pays = trainer.args.kl_in == "reward"
    kl_to_pay = torch.full_like(samples.values, 0.1) if pays else None
    is_remax = trainer.args.advantages == "remax"
    greedy = (torch.full_like(rewards, 0.5),) if is_remax else ()
    advantages, returns = assign(trainer, samples, rewards, kl_to_pay, *greedy)
    return {"advantages": advantages.detach(), "returns": returns.detach()}


def _learning_cases() -> tuple[Case, ...]:
    eight = {"num_minibatches": 4, "batches_per_learning_phase": 2, "seed": 1}
    return (
        Case("ordinary", {}),
        Case("one pass", {"batches_per_learning_phase": 1}),
        Case("in the second phase", {"phase": 1}),
        Case("gradients cut short", {"max_grad_norm": 0.01}),
        Case("the fourth minibatch is skipped", {**eight, "ratio_threshold": 1.003}),
        Case("the phase ends after five steps", {**eight, "target_kl": 0.0005}),
    )


def _observe_learning(learn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How far each part of the policy went, in units of its learning rate, and what was noted."""
    trainer = toy_trainer(**arguments)
    trainer.kl_controller.kl_coef *= 1.5  # no longer the one that the run began with
    rollout, steps = trainer.rollout_phase(), []
    trainer.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    parts = {"the unembedding": trainer.policy.base_model.unembed.W_U}
    parts["the value head"] = trainer.policy.value_head[0].weight
    before = {name: weight.detach().clone() for name, weight in parts.items()}
    lrs = dict(zip(parts, trainer.scheduler.get_last_lr(), strict=True))
    stats = learn(trainer, rollout)
    moved = {
        f"change of {name}": (weight.detach() - before[name]) / lrs[name]
        for name, weight in parts.items()
    }
    noted = dataclasses.asdict(stats) if isinstance(stats, LearningStats) else {}
    return {
        "optimizer steps": len(steps),
        "learning rates afterwards": trainer.scheduler.get_last_lr(),
        **moved,
        "returned": type(stats).__name__,
        **{name: torch.tensor(value) for name, value in noted.items()},
    }


_exercise = exercise_from("ppo.toml")

EXERCISES = (
    _exercise(assign_credit, cases=_credit_cases, observe=_observe_credit),
    _exercise(score_samples, cases=_scoring_cases, observe=_observe_scoring),
    _exercise(rollout_phase, cases=_rollout_cases, observe=_observe_rollout),
    _exercise(learning_phase, cases=_learning_cases, observe=_observe_learning),
)
