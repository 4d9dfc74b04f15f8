"""Exercises of lesson 06 on optimizer, learning-rate schedule and replay memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.course.exercises.toys import toy_rollout, toy_transformer
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training import ReplayMemory, get_optimizer, get_optimizer_and_scheduler, lr_scale


def _optimizer_cases() -> tuple[Case, ...]:
    return (
        Case("ordinary", {"base_lr": 1e-4, "head_lr": 1e-2}),
        Case("strong decay", {"base_lr": 2e-5, "head_lr": 5e-4, "weight_decay": 0.3}),
    )


def _observe_optimizer(make: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of every parameter, and what a step does to an objective."""
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
        own = [groups.get(id(p)) for p in part.parameters()]
        facts[f"parameters of the {name} left out"] = own.count(None)
        used = [group for group in own if group is not None]
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
    return _cases_of(shapes, "warmup_steps", "total_phases", "final_scale")


def _cases_of(shapes: Mapping[str, tuple[Any, ...]], *names: str) -> tuple[Case, ...]:
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
    """Both learning rates in every phase."""
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
    return _cases_of(shapes, "batch", "num_minibatches", "passes", "padded")


def _observe_memory(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What holds for the minibatches whatever the random order, and then the order."""
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
        "every pass has an order of its own": len({tuple(o) for o in orders}) == len(orders),
        "the generator decides the order": rows == [m.tokens[:, 0].tolist() for m in again],
        "rows of all tensors belong together": all(_belongs(m) for m in dealt),
        "whether prompts are padded": sorted({m.padded for m in dealt}),
        "the order that torch.randperm draws": rows,
    }


def _belongs(minibatch: Any) -> bool:
    row = minibatch.tokens[:, 0].float()
    names = ("logprobs", "values", "advantages", "returns")
    return all(torch.equal(getattr(minibatch, name)[:, 0], row) for name in names)


_exercise = exercise_from("optimizer.toml")

EXERCISES = (
    _exercise(get_optimizer, cases=_optimizer_cases, observe=_observe_optimizer),
    _exercise(lr_scale, cases=_scale_cases, observe=_observe_scale),
    _exercise(get_optimizer_and_scheduler, cases=_schedule_cases, observe=_observe_schedule),
    _exercise(ReplayMemory, cases=_memory_cases, observe=_observe_memory),
)
