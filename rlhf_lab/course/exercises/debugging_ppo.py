"""Exercises of the appendix on PPO: optimizer, minibatches, the two phases, an alarm."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.course.exercises.toys import toy_rollout, toy_trainer, toy_transformer
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training import (
    LearningStats,
    ReplayMemory,
    get_optimizer,
    get_optimizer_and_scheduler,
)
from rlhf_lab.training.ppo import assign_credit, learning_phase, rollout_phase, score_samples


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


def _observe_memory(build: Answer, batch: int, count: int, passes: int, padded: bool) -> Any:
    memory = build(toy_rollout(batch, padded), count, passes)
    parts = list(memory.get_minibatches(torch.Generator().manual_seed(5)))
    again = list(memory.get_minibatches(torch.Generator().manual_seed(5)))
    rows = [minibatch.tokens[:, 0].tolist() for minibatch in parts]
    orders = [sum(rows[i : i + count], []) for i in range(0, len(rows), count)]
    return {
        "minibatches": len(parts),
        "sequences per minibatch": [len(part) for part in rows],
        "each pass uses every sequence once": all(sorted(o) == [*range(batch)] for o in orders),
        "the order is shuffled": all(order != sorted(order) for order in orders),
        "every pass has a new order": len({tuple(o) for o in orders}) == len(orders),
        "the generator decides the order": rows == [m.tokens[:, 0].tolist() for m in again],
        "rows of all tensors belong together": all(
            torch.equal(x[:, 0], m.tokens[:, 0].float())
            for m in parts
            for x in (m.logprobs, m.values, m.advantages, m.returns)
        ),
        "whether prompts are padded": sorted({m.padded for m in parts}),
        "the order that torch.randperm draws": rows,
    }


def _observe_scoring(score: Answer, raw: Sequence[float] = (), **fields: Any) -> dict[str, Any]:
    trainer = toy_trainer(**fields)
    samples = trainer.rollout_phase().samples
    return _facts(score(trainer, samples, *([torch.tensor(raw)] if raw else [])))


def _facts(rollout: Any) -> dict[str, Any]:
    names = "raw_rewards rewards kl entropy ref_residuals advantages returns ref_logprobs".split()
    tensors = {name: getattr(rollout, name) for name in names}
    samples = {"tokens": rollout.samples.tokens, "mask": rollout.samples.mask}
    found = {name: x.detach() for name, x in tensors.items() if x is not None}
    return {**samples, "texts": rollout.texts, **found}


def _observe_credit(assign: Answer, **arguments: Any) -> dict[str, Any]:
    trainer = toy_trainer(**arguments)
    trainer.kl_controller.kl_coef *= 1.5
    samples = trainer.rollout_phase().samples
    rewards = torch.arange(len(samples.tokens), dtype=torch.float32)
    kl = torch.full_like(samples.values, 0.1) if trainer.args.kl_in == "reward" else None
    greedy = [torch.full_like(rewards, 0.5)] * (trainer.args.advantages == "remax")
    advantages, returns = assign(trainer, samples, rewards, kl, *greedy)
    return {"advantages": advantages.detach(), "returns": returns.detach()}


def _observe_learning(learn: Answer, **arguments: Any) -> dict[str, Any]:
    trainer = toy_trainer(**arguments)
    trainer.kl_controller.kl_coef *= 1.5  # no longer the one that the run began with
    rollout, steps = trainer.rollout_phase(), []
    trainer.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    weights = trainer.policy.base_model.unembed.W_U, trainer.policy.value_head[0].weight
    before = [weight.detach().clone() for weight in weights]
    base_lr, head_lr = trainer.scheduler.get_last_lr()
    stats = learn(trainer, rollout)
    fields = dataclasses.asdict(stats) if isinstance(stats, LearningStats) else {}
    return {
        "optimizer steps": len(steps),
        "learning rates afterwards": trainer.scheduler.get_last_lr(),
        "change of the unembedding": (weights[0].detach() - before[0]) / base_lr,
        "change of the value head": (weights[1].detach() - before[1]) / head_lr,
        "returned": type(stats).__name__,
        **{name: torch.tensor(value) for name, value in fields.items()},
    }


_optimizer = make_exercise(get_optimizer, observe=_observe_optimizer)
_schedule = make_exercise(get_optimizer_and_scheduler, observe=_observe_schedule)
_memory = make_exercise(ReplayMemory, observe=_observe_memory)
_credit = make_exercise(assign_credit, observe=_observe_credit)
_scoring = make_exercise(score_samples, observe=_observe_scoring)
_rollout = make_exercise(rollout_phase, observe=lambda fn, **kw: _facts(fn(toy_trainer(**kw))))
_learning = make_exercise(learning_phase, observe=_observe_learning)


def alarm(numbers: dict[str, list[float]]) -> bool:
    """Return True if the dashboard of a finished run shows a broken trainer.

    `numbers` has one list for each line of the dashboard, with a number for each phase: "reward",
    "KL per sequence", "KL penalty", "entropy", "explained variance", "value loss", "first ratio",
    "clipped" and "gradient norm".
    """
    reward, value_loss = numbers["reward"], numbers["value loss"]
    signs = (
        max(abs(ratio - 1) for ratio in numbers["first ratio"]) > 0.01,
        min(numbers["KL penalty"]) < 0,
        max(numbers["KL per sequence"]) == 0,
        numbers["explained variance"][-1] < 0.1,
        value_loss[-1] > 3 * value_loss[0],
        reward[-1] < reward[0] + 0.1,
    )
    return any(signs)


def _observe_alarm(fn: Answer, order: int) -> dict[str, Any]:
    stored = stored_figures("dashboards")["runs"]
    kinds = list(stored)[::order]
    answers = {kind: [fn(numbers) for numbers in stored[kind]] for kind in kinds}
    facts: dict[str, Any] = {}
    for kind in ("healthy", *sorted(set(kinds) - {"healthy"})):
        where = "nothing is broken" if kind == "healthy" else kind
        facts[f"it goes off, of {len(answers[kind])}, where {where}"] = sum(answers[kind])
    are_unchanged = stored == stored_figures("dashboards")["runs"]
    return facts | {"the numbers are unchanged": are_unchanged}


_alarm = make_exercise(alarm, observe=_observe_alarm)
