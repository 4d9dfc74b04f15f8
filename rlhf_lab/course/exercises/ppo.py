"""Lesson 06, PPO: optimizer, learning-rate schedule, minibatches, rollout and learning phase."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.exercise import Case, make_exercise
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


def _optimizer_cases() -> tuple[Case, ...]:
    return (
        Case("ordinary", {"base_lr": 1e-4, "head_lr": 1e-2}),
        Case("strong decay", {"base_lr": 2e-5, "head_lr": 5e-4, "weight_decay": 0.3}),
    )


def _observe_optimizer(make: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
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


def _scale_cases() -> tuple[Case, ...]:
    shapes = {
        "ordinary": (2, 10, 0.1),
        "no warm-up": (0, 5, 0.25),
        "no decay": (3, 6, 1.0),
        "warm-up until the last phase": (4, 5, 0.1),
    }
    return _make_cases(shapes, "warmup_steps", "total_phases", "final_scale")


def _make_cases(shapes: Mapping[str, tuple[Any, ...]], *names: str) -> tuple[Case, ...]:
    return tuple(Case(label, dict(zip(names, s, strict=False))) for label, s in shapes.items())


def _observe_scale(scale: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    phases = range(arguments["total_phases"] + 2)
    return {f"scale in phase {phase}": scale(phase, **arguments) for phase in phases}


def _schedule_cases() -> tuple[Case, ...]:
    fields = {"base_lr": 1e-4, "head_lr": 1e-2, "total_phases": 8, "warmup_steps": 2}
    return (
        Case("ordinary", fields | {"final_scale": 0.1, "weight_decay": 0.3}),
        Case("no warm-up", fields | {"final_scale": 0.5, "warmup_steps": 0}),
    )


def _observe_schedule(make: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
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


def _memory_cases() -> tuple[Case, ...]:
    shapes = {
        "ordinary": (12, 3, 2),
        "one pass": (8, 2, 1),
        "one minibatch": (6, 1, 2),
        "one sequence each": (6, 6, 2),
        "padded prompts": (8, 2, 1, True),
    }
    return _make_cases(shapes, "batch", "num_minibatches", "passes", "padded")


def _observe_memory(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    batch, count, passes = (arguments[n] for n in ("batch", "num_minibatches", "passes"))
    memory = build(toy_rollout(batch, padded=arguments.get("padded", False)), count, passes)
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
    generator = phase_generator(trainer.args.seed, trainer.phase, "sampling")
    return trainer.sample(trainer.next_prompts(), generator)


def _observe_rollout(roll_out: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return _facts(roll_out(toy_trainer(**arguments)))


def _observe_scoring(score: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
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
    make_exercise(get_optimizer, cases=_optimizer_cases, observe=_observe_optimizer),
    make_exercise(lr_scale, cases=_scale_cases, observe=_observe_scale),
    make_exercise(get_optimizer_and_scheduler, cases=_schedule_cases, observe=_observe_schedule),
    make_exercise(ReplayMemory, cases=_memory_cases, observe=_observe_memory),
    make_exercise(assign_credit, cases=_credit_cases, observe=_observe_credit),
    make_exercise(score_samples, cases=_scoring_cases, observe=_observe_scoring),
    make_exercise(rollout_phase, cases=_rollout_cases, observe=_observe_rollout),
    make_exercise(learning_phase, cases=_learning_cases, observe=_observe_learning),
)
