"""Exercises of lesson 06 on the two phases of PPO: credit, scoring, rollout, learning."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.toys import toy_trainer
from rlhf_lab.samples import Samples
from rlhf_lab.training import (
    LearningStats,
    RLHFTrainer,
    Rollout,
)
from rlhf_lab.training.ppo import assign_credit, learning_phase, rollout_phase, score_samples
from rlhf_lab.training.random_streams import phase_generator

LESSON = "06_ppo"
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


def _credit_cases() -> tuple[Case, ...]:
    return (
        Case("ordinary", {}),
        Case("one step ahead", {"advantages": "one_step"}),
        Case("texts that end early", {"prefix": WHOLE_REVIEW}),
        Case("rewards pay for the KL", {"kl_in": "reward", "kl_coef": 0.7}),
        Case("answers are compared", {"advantages": "rloo", "samples_per_prompt": 2}),
    )


def _samples_of(trainer: RLHFTrainer) -> Samples:
    """What the trainer's policy writes in its phase."""
    place = (trainer.args.seed, trainer.phase, "sampling", trainer.device)
    return trainer.sample(trainer.next_prompts(), phase_generator(*place))


def _observe_rollout(roll_out: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a rollout of a trainer holds."""
    return _facts(roll_out(toy_trainer(**arguments)))


def _observe_scoring(score: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a rollout made of finished samples holds."""
    trainer = toy_trainer(**arguments)
    return _facts(score(trainer, _samples_of(trainer)))


def _facts(rollout: Any) -> dict[str, Any]:
    if not isinstance(rollout, Rollout):
        return {"returned": type(rollout).__name__}
    names = ("raw_rewards", "rewards", "kl", "entropy", "ref_residuals", "advantages", "returns")
    return {
        "returned": "Rollout",
        "tokens": rollout.samples.tokens,
        "mask": rollout.samples.mask,
        "texts": rollout.texts,
        **{name: getattr(rollout, name).detach() for name in names},
    }


def _observe_credit(assign: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Advantages and returns of a batch with rewards 0, 1, 2, ... and a KL of 0.1 per token."""
    trainer = toy_trainer(**arguments)
    samples = _samples_of(trainer)
    rewards = torch.arange(len(samples.tokens), dtype=torch.float32)
    pays = trainer.args.kl_in == "reward"
    kl_to_pay = torch.full_like(samples.values, 0.1) if pays else None
    advantages, returns = assign(trainer, samples, rewards, kl_to_pay)
    return {"advantages": advantages.detach(), "returns": returns.detach()}


def _learning_cases() -> tuple[Case, ...]:
    return (
        Case("ordinary", {}),
        Case("one pass", {"batches_per_learning_phase": 1}),
        Case("in the second phase", {"phase": 1}),
        Case("gradients cut short", {"max_grad_norm": 0.01}),
    )


def _observe_learning(learn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How far each part of the policy went, in units of its learning rate, and what was noted."""
    trainer = toy_trainer(**arguments)
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


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=assign_credit,
        difficulty=3,
        minutes=20,
        hints=(
            "Three steps, and a function for each: rewards of tokens, then advantages, then "
            "returns.",
            "rewards is [batch]; token_rewards, values, advantages and returns are [batch gen]; "
            "the group is a number for each row that the answers to one prompt share.",
            "token_rewards(rewards, mask, kl_to_pay, kl_coef); functions.estimate_advantages(args, "
            "samples.values, rewards, mask, token_rewards, group, greedy_rewards); "
            "functions.estimate_returns(args, advantages, samples.values, token_rewards, mask).",
        ),
        cases=_credit_cases,
        observe=_observe_credit,
        slips=(
            Slip(
                "the mask is not handed on to the advantages",
                {"trainer.functions, samples.mask": "trainer.functions, samples.mask | True"},
            ),
            Slip(
                "the tokens do not pay for their KL, although the rewards are to",
                {"mask, kl_to_pay, kl_coef": "mask"},
            ),
            Slip(
                "the tokens are paid for their KL: a reward has kl_coef times the KL taken off",
                {"mask, kl_to_pay, kl_coef": "mask, kl_to_pay, -kl_coef"},
            ),
            Slip(
                "the KL is taken off without its weight kl_coef",
                {"else trainer.kl_controller.kl_coef": "else 1.0"},
            ),
            Slip(
                "the answers to different prompts are in one group",
                {"len(rewards), args.samples_per_prompt": "len(rewards), len(rewards)"},
            ),
            Slip(
                "the values are not added: a return is advantage plus value",
                {"return advantages, returns": "return advantages, advantages"},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=score_samples,
        difficulty=4,
        minutes=30,
        hints=(
            "Everything is there: trainer.rewards scores, `compare_with_reference` measures, "
            "`assign_credit` is yours. The work is to hand the right thing on to each.",
            "samples has tokens [batch seq], values and mask [batch gen]; scores.rewards is "
            "[batch]; compared.kl and compared.entropy are [batch gen].",
            "scores = trainer.rewards.score(samples, raw_rewards); compared = "
            "compare_with_reference(trainer.policy, trainer.reference, samples, "
            "args.temperature, args.minibatch_size, trainer.forward); advantages, returns = "
            "assign_credit(trainer, samples, scores.rewards); then the Rollout.",
        ),
        cases=_rollout_cases,
        observe=_observe_scoring,
        slips=(
            Slip(
                "the advantages are made of the raw rewards, not of the normalised ones",
                {"samples, scores.rewards, kl_to_pay": "samples, scores.raw_rewards, kl_to_pay"},
            ),
            Slip(
                "the rewards are normalised even if args.normalize_reward is off",
                {
                    "samples, scores.rewards, kl_to_pay": "samples, (scores.raw_rewards - "
                    "scores.raw_rewards.mean()) / (scores.raw_rewards.std() + 1e-8), kl_to_pay"
                },
            ),
            Slip(
                "the policy is compared with itself, not with the reference",
                {"(policy, reference, samples": "(policy, policy.base_model, samples"},
            ),
            Slip(
                "KL and entropy are taken without the temperature",
                {"settings = args.temperature,": "settings = 1.0,"},
            ),
            Slip(
                "every token's reward pays for its KL, which the loss does already",
                {"scores.rewards, kl_to_pay,": "scores.rewards, compared.kl,"},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=rollout_phase,
        difficulty=2,
        minutes=10,
        hints=(
            "Two lines do the work: one samples, the other scores.",
            "trainer.sample takes prompts, which trainer.next_prompts() has, and a generator.",
            'phase_generator(trainer.args.seed, trainer.phase, "sampling", trainer.device); '
            "score_samples(trainer, samples) makes the rollout.",
        ),
        cases=_rollout_cases,
        observe=_observe_rollout,
        slips=(
            Slip(
                "every phase draws the random numbers of the first one",
                {"args.seed, trainer.phase,": "args.seed, 0,"},
            ),
            Slip(
                "sampling draws the random numbers that are for the minibatches",
                {'phase, "sampling"': 'phase, "minibatches"'},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=learning_phase,
        difficulty=4,
        minutes=35,
        hints=(
            "Inside the loop stands what every training loop has: zero_grad, loss, backward, step. "
            "Only that the loss is an objective, which the optimiser climbs by itself.",
            "The generator comes from phase_generator(args.seed, trainer.phase, "
            '"minibatches"). PhaseStats(trainer) judges and counts; Ascent(trainer) goes back, '
            "clips and steps, and cuts the minibatch into parts if micro_batch_size is set.",
            "trainer.optimizer.zero_grad(); terms = objective_terms(trainer.policy, "
            "trainer.reference, minibatch, trainer.objective, kl_coef); "
            "ascent.backward(terms.objective); grad_norm = ascent.clip(args.max_grad_norm); "
            "ascent.step(); stats.add(terms, minibatch, grad_norm). After the loop "
            "stats.learning_stats(memory) and trainer.scheduler.step().",
        ),
        cases=_learning_cases,
        observe=_observe_learning,
        slips=(
            Slip(
                "the gradients are never cleared, so that those of earlier minibatches stay",
                {"trainer.optimizer.zero_grad()": "pass"},
            ),
            Slip(
                "the gradient is not scaled down to max_grad_norm",
                {"ascent.clip(args.max_grad_norm)": "ascent.clip(None)"},
            ),
            Slip(
                "this walks down the objective: the optimiser maximises already",
                {"ascent.backward(terms.objective)": "ascent.backward(-terms.objective)"},
            ),
            Slip(
                "only the clipped surrogate is climbed, not the whole objective",
                {"ascent.backward(terms.objective)": "ascent.backward(terms.clipped_surrogate)"},
            ),
            Slip(
                "the schedule is stepped with every minibatch: it counts phases",
                {
                    "        stats.add(": "        trainer.scheduler.step()\n        stats.add(",
                    "    trainer.scheduler.step()\n    trainer.rewards": "    trainer.rewards",
                },
            ),
            Slip(
                "the schedule is never stepped",
                {"    trainer.scheduler.step()\n": ""},
            ),
            Slip(
                "the batch is dealt out once, not once per pass",
                {"num_minibatches, args.batches_per_learning_phase": "num_minibatches, 1"},
            ),
            Slip(
                "every phase deals in the order of the first one",
                {"args.seed, trainer.phase,": "args.seed, 0,"},
            ),
        ),
    ),
)
