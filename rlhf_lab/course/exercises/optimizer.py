"""Exercises of lesson 06 on optimizer, learning-rate schedule and replay memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.toys import toy_rollout, toy_transformer
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training import (
    ReplayMemory,
    get_optimizer,
    get_optimizer_and_scheduler,
    lr_scale,
)

LESSON = "06_ppo"
ENDS_LATE = {"total_phases - 1 - warmup_steps": "total_phases - warmup_steps"}
GOES_ON = {
    "min(1.0, (phase - warmup_steps) / decay_phases)": "(phase - warmup_steps) / decay_phases"
}
FALLS = ({}, ENDS_LATE, GOES_ON, ENDS_LATE | GOES_ON)


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
    return facts


def _scale_cases() -> tuple[Case, ...]:
    shapes = {
        "ordinary": (2, 10, 0.1),
        "no warm-up": (0, 5, 0.25),
        "no decay": (3, 6, 1.0),
        "warm-up until the last phase": (4, 5, 0.1),
    }
    names = ("warmup_steps", "total_phases", "final_scale")
    return tuple(Case(label, dict(zip(names, s, strict=True))) for label, s in shapes.items())


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
        lrs = _settings(optimizer, policy)
        for part in ("transformer", "value head"):
            facts[f"phase {phase}: learning rate of the {part}"] = lrs[
                f"learning rate of the {part}"
            ]
        optimizer.step()
        scheduler.step()
    return facts


def _memory_cases() -> tuple[Case, ...]:
    shapes = {
        "ordinary": (12, 3, 2),
        "one pass": (8, 2, 1),
        "one minibatch": (6, 1, 2),
        "one sequence each": (6, 6, 2),
    }
    names = ("batch", "num_minibatches", "passes")
    return tuple(Case(label, dict(zip(names, s, strict=True))) for label, s in shapes.items())


def _observe_memory(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What holds for the minibatches whatever the random order: sizes, coverage, belonging."""
    batch, count, passes = (arguments[n] for n in ("batch", "num_minibatches", "passes"))
    memory = build(toy_rollout(batch), count, passes)
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
    }


def _belongs(minibatch: Any) -> bool:
    row = minibatch.tokens[:, 0].float()
    names = ("logprobs", "values", "advantages", "returns")
    return all(torch.equal(getattr(minibatch, name)[:, 0], row) for name in names)


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=get_optimizer,
        difficulty=2,
        minutes=10,
        hints=(
            "An optimiser can treat groups of parameters differently: give it a list of "
            "dictionaries instead of parameters.",
            'Two groups, each {"params": [...], "lr": ...}: policy.base_model.parameters() and '
            "policy.value_head.parameters().",
            "AdamW(groups, maximize=True, weight_decay=weight_decay)",
        ),
        cases=_optimizer_cases,
        observe=_observe_optimizer,
        slips=(
            Slip(
                "this minimises: the objective is something to have more of",
                {"maximize=True": "maximize=False"},
            ),
            Slip(
                "the two learning rates are swapped",
                {'"lr": base_lr': '"lr": head_lr', '"lr": head_lr': '"lr": base_lr'},
            ),
            Slip("both parts have the same learning rate", {'"lr": head_lr': '"lr": base_lr'}),
            Slip(
                "the weight decay is not used", {"weight_decay=weight_decay": "weight_decay=0.01"}
            ),
            Slip(
                "the value head is in no group, so it never learns",
                {"AdamW(groups,": "AdamW(groups[:1],"},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=lr_scale,
        difficulty=2,
        minutes=10,
        hints=(
            "Two straight lines: up to 1 during the warm-up, and down to final_scale in the last "
            "phase.",
            "Phases count from 0 to total_phases - 1. The scale is 1 in phase warmup_steps, and "
            "must not be 0 in phase 0, or the first phase learns nothing.",
            "(phase + 1) / (warmup_steps + 1) while phase < warmup_steps; after that 1 - (1 - "
            "final_scale) * progress, with progress = (phase - warmup_steps) / (total_phases - 1 "
            "- warmup_steps), at most 1.",
        ),
        cases=_scale_cases,
        observe=_observe_scale,
        slips=(
            *(
                Slip(
                    "the scale is 0 in phase 0, which then learns nothing",
                    {"return (phase + 1) / (warmup_steps + 1)": "return phase / warmup_steps"}
                    | fall,
                )
                for fall in FALLS
            ),
            *(
                Slip(
                    "the warm-up is one phase too short: the scale is 1 in phase warmup_steps, not "
                    "before",
                    {"return (phase + 1) / (warmup_steps + 1)": "return (phase + 1) / warmup_steps"}
                    | fall,
                )
                for fall in FALLS
            ),
            Slip(
                "this decays to 0, and should to final_scale",
                {"1 - (1 - final_scale) * progress": "1 - progress"},
            ),
            Slip("the scale goes on falling after the last phase", GOES_ON),
            *(
                Slip(
                    "final_scale is reached one phase too late: the last phase is total_phases - 1",
                    ENDS_LATE | after,
                )
                for after in ({}, GOES_ON)
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=get_optimizer_and_scheduler,
        difficulty=2,
        minutes=10,
        hints=(
            "LambdaLR multiplies every group's learning rate by a function of how often it was "
            "stepped, which here is the phase.",
            "The function takes the phase alone; the other arguments of lr_scale come from args.",
            "LambdaLR(optimizer, lr_lambda=lambda phase: lr_scale(phase, args.warmup_steps, "
            "args.total_phases, args.final_scale))",
        ),
        cases=_schedule_cases,
        observe=_observe_schedule,
        slips=(
            Slip(
                "the two learning rates are swapped",
                {"args.base_lr, args.head_lr": "args.head_lr, args.base_lr"},
            ),
            Slip("the weight decay of args is not used", {", args.weight_decay)": ")"}),
            Slip("the schedule is one phase ahead", {"lr_scale(phase,": "lr_scale(phase + 1,"}),
            Slip(
                "warmup_steps and total_phases are swapped",
                {"args.warmup_steps, args.total_phases": "args.total_phases, args.warmup_steps"},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=ReplayMemory,
        difficulty=2,
        minutes=15,
        hints=(
            "Do not shuffle the tensors: draw an order of the row numbers, and take rows by "
            "number. self._take does the taking.",
            "An order is [batch]; reshaped to [num_minibatches, minibatch] each of its rows is one "
            "minibatch. Draw a new order for every pass.",
            "for each pass: order = torch.randperm(batch, generator=generator); for rows in "
            "order.reshape(self.num_minibatches, -1): yield self._take(rows, "
            "self.rollout.samples.is_padded)",
        ),
        cases=_memory_cases,
        methods=("get_minibatches",),
        observe=_observe_memory,
        slips=(
            Slip(
                "every pass deals in the same order",
                {
                    "[torch.randperm(batch, generator=generator) for _ in range(self.passes)]": ""
                    "[torch.randperm(batch, generator=generator)] * self.passes"
                },
            ),
            Slip(
                "the batch is dealt out once, not once per pass",
                {
                    "range(self.passes)": "range(1)",
                    "self.passes * self.num_minibatches": "self.num_minibatches",
                },
            ),
            Slip(
                "the order is not shuffled",
                {"torch.randperm(batch, generator=generator)": "torch.arange(batch)"},
            ),
            Slip(
                "num_minibatches is taken for the size of a minibatch",
                {
                    "reshape(self.passes * self.num_minibatches, -1)": ""
                    "reshape(-1, self.num_minibatches)"
                },
            ),
            Slip(
                "rows are drawn with replacement: some come twice, others never",
                {
                    "torch.randperm(batch, generator=generator)": "torch.randint(batch, (batch,), "
                    "generator=generator)"
                },
            ),
        ),
    ),
)
