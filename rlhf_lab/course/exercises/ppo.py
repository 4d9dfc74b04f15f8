"""Lesson 06, PPO: advantages, minibatches, the optimiser and its schedule, the two phases."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.toys import toy_rollout, toy_trainer, toy_transformer
from rlhf_lab.functional import compute_advantages, compute_gae, compute_returns
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

LESSON = "06_ppo"
MULTIPLIED = "this multiplies by the mask, and 0 * nan is nan: put 0 there instead"
MASK_UNUSED = "the mask is not used: step over masked tokens, and put 0 there"
ONE_STEP = "reward + gamma * next_value - value"
NOT_LAST_REAL = (
    "what comes after a response is read from the padding: step over masked tokens, so that the "
    "last real token sees what lies behind the response"
)
ENDS_LATE = {"total_phases - 1 - warmup_steps": "total_phases - warmup_steps"}
GOES_ON = {
    "min(1.0, (phase - warmup_steps) / decay_phases)": "(phase - warmup_steps) / decay_phases"
}
FALLS = ({}, ENDS_LATE, GOES_ON, ENDS_LATE | GOES_ON)
WHOLE_REVIEW = (
    "this movie wow , the plot was so solid and the music was so good and the script was so clever "
    ". i liked it ."
)


def _one_step_cases() -> tuple[Case, ...]:
    cases = standard_cases(
        compute_advantages, large={"values": 1e6, "rewards": 1e6}, spoil=("values",)
    )
    sizes = {"batch": 3, "gen": 4}
    arguments = draw(compute_advantages, sizes, 8, {"gamma": 0.9}, optional=("mask",))
    paid = torch.randn(3, 4, generator=torch.Generator().manual_seed(9))
    return (*cases, Case("a reward for each token, discounted", arguments | {"rewards": paid}))


def _gae_cases() -> tuple[Case, ...]:
    large = {"values": 1e6, "token_rewards": 1e6}
    spoil = ("values", "token_rewards")
    cases = standard_cases(compute_gae, large=large, spoil=spoil, gamma=0.9, lam=0.8)
    undiscounted = draw(compute_gae, {"batch": 3, "gen": 4}, 11)
    return (*cases, Case("gamma and lam as by default", undiscounted))


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
        reference=compute_advantages,
        difficulty=2,
        minutes=15,
        hints=(
            "The advantage of a token is how much better the next state is than this one. Behind "
            "the last token stands the reward itself.",
            "values is [batch gen], rewards [batch] or [batch gen], the result [batch gen]. A "
            "masked token keeps the next value as it is.",
            "Going backwards: advantage = torch.where(real, reward + gamma * next_value - value, "
            "0.0), then next_value = torch.where(real, value, next_value); stack the list the "
            "right way round.",
        ),
        cases=_one_step_cases,
        slips=(
            Slip(
                "this is the reward minus the value at every token, not one step ahead",
                {ONE_STEP: "paid.sum(1) - value"},
            ),
            Slip("the value of the next state is missing", {ONE_STEP: "reward - value"}),
            Slip(
                "the next value is not discounted with gamma",
                {"gamma * next_value -": "next_value -"},
            ),
            Slip(
                "masked tokens have an advantage: put 0 there",
                {f"{ONE_STEP}, 0.0": f"{ONE_STEP}, paid.sum(1) - value"},
            ),
            Slip(
                "masked tokens have an advantage: put 0 there",
                {f"torch.where(real, {ONE_STEP}, 0.0)": ONE_STEP},
            ),
            Slip(
                NOT_LAST_REAL,
                {"next_value = torch.where(real, value, next_value)": "next_value = value"},
            ),
            Slip(
                NOT_LAST_REAL,
                {
                    "torch.zeros_like(values[:, 0])": "paid.sum(1)",
                    ONE_STEP: "next_value - value",
                    "next_value = torch.where(real, value, next_value)": "next_value = value",
                },
            ),
            Slip(
                MULTIPLIED,
                {f"torch.where(real, {ONE_STEP}, 0.0)": f"({ONE_STEP}) * real"},
            ),
            Slip("the advantages stand in backward order", {"advantages[::-1]": "advantages"}),
            Slip(
                "the sign is the other way round: next value minus this one",
                {ONE_STEP: "value - gamma * next_value - reward"},
            ),
            Slip(MASK_UNUSED, {" if mask is None else mask": ""}),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=compute_gae,
        difficulty=4,
        minutes=25,
        hints=(
            "Every advantage is the one-step error here, plus a discounted part of the next "
            "advantage. So begin at the end.",
            "At each t, delta, value and advantage are [batch]. Keep two of them for the step "
            "before: next_value and next_advantage, unchanged where the mask is False.",
            "delta = token_rewards[:, t] + gamma * next_value - values[:, t]; advantage = delta + "
            "gamma * lam * next_advantage.",
        ),
        cases=_gae_cases,
        slips=(
            Slip("lam is not used", {"gamma * lam * next_advantage": "gamma * next_advantage"}),
            Slip(
                "the next advantage is not discounted with gamma",
                {"gamma * lam * next_advantage": "lam * next_advantage"},
            ),
            Slip(
                "the next value is not discounted with gamma",
                {"gamma * next_value -": "next_value -"},
            ),
            Slip("the value of this state is not subtracted", {" - values[:, t]": ""}),
            Slip(
                "the last state's own value stands in for what comes behind the response, which is "
                "0",
                {
                    "next_value = next_advantage = torch.zeros_like(values[:, 0])": "next_value, "
                    "next_advantage = values[:, -1], torch.zeros_like(values[:, 0])"
                },
            ),
            Slip(
                NOT_LAST_REAL,
                {
                    "torch.where(mask[:, t], values[:, t], next_value)": "values[:, t]",
                    "torch.where(mask[:, t], advantage, next_advantage)": "advantage",
                },
            ),
            Slip(
                "masked tokens have an advantage: put 0 there",
                {"torch.where(mask[:, t], advantage, 0.0)": "advantage"},
            ),
            Slip(
                MULTIPLIED,
                {"torch.where(mask[:, t], advantage, 0.0)": "advantage * mask[:, t]"},
            ),
            Slip(
                "this walks forward in time: advantages are built from the end",
                {
                    "reversed(range(values.shape[1]))": "range(values.shape[1])",
                    "advantages[::-1]": "advantages",
                },
            ),
            Slip(MASK_UNUSED, {" if mask is None else mask": ""}),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=compute_returns,
        difficulty=1,
        minutes=5,
        hints=(
            "An advantage is how much better things went than the value said. So how well did "
            "they go?",
            "All three are [batch gen]; put 0 where the mask is False.",
            "zero_masked(advantages + values, mask)",
        ),
        cases=lambda: standard_cases(
            compute_returns,
            large={"advantages": 1e6, "values": 1e6},
            spoil=("advantages", "values"),
        ),
        slips=(
            Slip(
                "this subtracts the value: a return is advantage plus value",
                {"+ at_least_float32(values)": "- at_least_float32(values)"},
            ),
            Slip(
                "the advantages are whitened: the returns need them as they are",
                {
                    "at_least_float32(advantages) +": "(advantages - advantages.mean()) / "
                    "(advantages.std() + 1e-8) +"
                },
            ),
            Slip("the mask is not used: put 0 where it is False", {", mask)": ", None)"}),
            Slip(
                MULTIPLIED,
                {
                    "return zero_masked(": "return (1.0 if mask is None else mask) * (",
                    ", mask)": ")",
                },
            ),
        ),
    ),
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
                {"reference, samples, temperature": "reference, samples, 1.0"},
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
