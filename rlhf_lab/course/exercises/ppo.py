"""Exercises on PPO: optimizer, learning-rate schedule, minibatches, rollout and learning phase."""

import dataclasses
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.cases import Cases
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.course.exercises.toys import toy_rollout, toy_trainer, toy_transformer
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.samples import Samples
from rlhf_lab.training import (
    LearningStats,
    ReplayMemory,
    RLHFTrainer,
    Rollout,
    get_optimizer,
    get_optimizer_and_scheduler,
    lr_scale,
)
from rlhf_lab.training.ppo import assign_credit, learning_phase, rollout_phase, score_samples
from rlhf_lab.training.random_streams import phase_generator


def _optimizer_cases() -> Cases:
    return {
        "ordinary": {"base_lr": 1e-4, "head_lr": 1e-2},
        "strong decay": {"base_lr": 2e-5, "head_lr": 5e-4, "weight_decay": 0.3},
    }


def _observe_optimizer(make: Answer, **arguments: Any) -> dict[str, Any]:
    policy = TransformerWithValueHead(toy_transformer())
    optimizer = make(policy, **arguments)
    facts = _settings(optimizer, policy)
    facts |= {name: optimizer.defaults.get(name) for name in ("betas", "eps", "fused")}
    bias = policy.value_head[2].bias
    before = bias.item()
    bias.sum().backward()
    optimizer.step()
    return facts | {"a step raises the objective": bias.item() > before}


def _settings(optimizer: Any, policy: TransformerWithValueHead) -> dict[str, Any]:
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parts = {"transformer": policy.base_model, "value head": policy.value_head}
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for name, part in parts.items():
        of_part = [groups.get(id(p)) for p in part.parameters()]
        facts[f"parameters of the {name} left out"] = of_part.count(None)
        used = [group for group in of_part if group is not None]
        facts[f"learning rate of the {name}"] = sorted({group["lr"] for group in used})
        facts[f"weight decay of the {name}"] = sorted({group["weight_decay"] for group in used})
        facts[f"{name} is maximized"] = sorted({group["maximize"] for group in used})
    return facts


def _scale_cases() -> Cases:
    shapes = {
        "ordinary": (2, 10, 0.1),
        "no warm-up": (0, 5, 0.25),
        "no decay": (3, 6, 1.0),
        "warm-up until the last phase": (4, 5, 0.1),
    }
    names = ("warmup_steps", "total_phases", "final_scale")
    return {label: dict(zip(names, shape, strict=True)) for label, shape in shapes.items()}


def _observe_scale(scale: Answer, **arguments: Any) -> dict[str, Any]:
    phases = range(arguments["total_phases"] + 2)
    return {f"scale in phase {phase}": scale(phase, **arguments) for phase in phases}


def _schedule_cases() -> Cases:
    fields = {"base_lr": 1e-4, "head_lr": 1e-2, "total_phases": 8, "warmup_steps": 2}
    return {
        "ordinary": fields | {"final_scale": 0.1, "weight_decay": 0.3},
        "no warm-up": fields | {"final_scale": 0.5, "warmup_steps": 0},
    }


def _observe_schedule(make: Answer, **arguments: Any) -> dict[str, Any]:
    policy = TransformerWithValueHead(toy_transformer())
    args = RLHFArgs(preset="reel", **arguments)
    optimizer, scheduler = make(args, policy)
    facts = _settings(optimizer, policy)
    for phase in range(args.total_phases):
        now = _settings(optimizer, policy).items()
        facts |= {f"phase {phase}: {name}": fact for name, fact in now if "learning rate" in name}
        optimizer.step()
        scheduler.step()
    return facts


def _memory_cases() -> Cases:
    shapes = {
        "ordinary": (12, 3, 2, False),
        "one pass": (8, 2, 1, False),
        "one minibatch": (6, 1, 2, False),
        "one sequence each": (6, 6, 2, False),
        "padded prompts": (8, 2, 1, True),
    }
    names = ("batch", "count", "passes", "padded")
    return {label: dict(zip(names, shape, strict=True)) for label, shape in shapes.items()}


def _observe_memory(
    build: Answer, batch: int, count: int, passes: int, padded: bool
) -> dict[str, Any]:
    memory = build(toy_rollout(batch, padded=padded), count, passes)
    dealt = list(memory.get_minibatches(torch.Generator().manual_seed(5)))
    again = list(memory.get_minibatches(torch.Generator().manual_seed(5)))
    rows = [minibatch.tokens[:, 0].tolist() for minibatch in dealt]
    orders = [sum(rows[i : i + count], []) for i in range(0, len(rows), count)]
    return {
        "minibatches": len(dealt),
        "sequences in each": [len(part) for part in rows],
        "each pass deals every sequence once": all(sorted(o) == [*range(batch)] for o in orders),
        "the order is shuffled": all(order != sorted(order) for order in orders),
        "every pass has another order": len({tuple(o) for o in orders}) == len(orders),
        "the generator decides the order": rows == [m.tokens[:, 0].tolist() for m in again],
        "rows of all tensors belong together": all(_belongs(m) for m in dealt),
        "whether prompts are padded": sorted({m.padded for m in dealt}),
        "the order that torch.randperm draws": rows,
    }


def _belongs(minibatch: Any) -> bool:
    row = minibatch.tokens[:, 0].float()
    names = ("logprobs", "values", "advantages", "returns")
    return all(torch.equal(getattr(minibatch, name)[:, 0], row) for name in names)


WHOLE_REVIEW = (
    "this movie wow , the plot was so solid and the music was so good and the script was so clever "
    ". i liked it ."
)


def _rollout_cases() -> Cases:
    return {
        "ordinary": {},
        "batch of 2, rewards as they are": {"batch_size": 2, "normalize_reward": False},
        "in the second phase": {"phase": 1},
        "cooler, and cut to the top 5": {"temperature": 0.7, "top_k": 5},
        "texts that end early": {"prefix": WHOLE_REVIEW, "normalize_reward": False},
    }


def _scoring_cases() -> Cases:
    as_they_are = {"normalize_reward": False}
    return {
        **_rollout_cases(),
        "rewards that are handed in": {"batch_size": 2, "raw_rewards": (3.0, -1.0), **as_they_are},
        "the KL is in the rewards": {"kl_in": "reward", "kl_coef": 0.7},
        "the KL is estimated": {"kl_estimator": "k3"},
        "an estimated KL is in the rewards": {"kl_in": "reward", "kl_estimator": "k1"},
        "greedy answers are the baseline": {"advantages": "remax", **as_they_are},
    }


def _credit_cases() -> Cases:
    return {
        "ordinary": {},
        "one step ahead, rewards whitened": {"advantages": "one_step", "whiten_rewards": True},
        "texts that end early": {"prefix": WHOLE_REVIEW},
        "the KL is in the rewards": {"kl_in": "reward", "kl_coef": 0.7},
        "answers are compared": {"advantages": "rloo", "samples_per_prompt": 2},
        "greedy answers are the baseline": {"advantages": "remax", "normalize_reward": False},
    }


def _samples_of(trainer: RLHFTrainer) -> Samples:
    generator = phase_generator(trainer.args.seed, trainer.phase, "sampling")
    return trainer.sample(trainer.next_prompts(), generator)


def _observe_rollout(roll_out: Answer, **arguments: Any) -> dict[str, Any]:
    return _facts(roll_out(toy_trainer(**arguments)))


def _observe_scoring(
    score: Answer, raw_rewards: tuple[float, ...] = (), **fields: Any
) -> dict[str, Any]:
    trainer = toy_trainer(**fields)
    raw = [torch.tensor(raw_rewards)] if raw_rewards else []
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


def _observe_credit(assign: Answer, **arguments: Any) -> dict[str, Any]:
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


def _learning_cases() -> Cases:
    eight = {"num_minibatches": 4, "batches_per_learning_phase": 2, "seed": 1}
    return {
        "ordinary": {},
        "one pass": {"batches_per_learning_phase": 1},
        "in the second phase": {"phase": 1},
        "gradients cut short": {"max_grad_norm": 0.01},
        "the fourth minibatch is skipped": {**eight, "ratio_threshold": 1.003},
        "the phase ends after five steps": {**eight, "target_kl": 0.0005},
    }


def _observe_learning(learn: Answer, **arguments: Any) -> dict[str, Any]:
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


EXERCISES = (
    make_exercise(get_optimizer, _optimizer_cases, _observe_optimizer),
    make_exercise(lr_scale, _scale_cases, _observe_scale),
    make_exercise(get_optimizer_and_scheduler, _schedule_cases, _observe_schedule),
    make_exercise(ReplayMemory, _memory_cases, _observe_memory),
    make_exercise(assign_credit, _credit_cases, _observe_credit),
    make_exercise(score_samples, _scoring_cases, _observe_scoring),
    make_exercise(rollout_phase, _rollout_cases, _observe_rollout),
    make_exercise(learning_phase, _learning_cases, _observe_learning),
)
