"""Custom optimizers, schedulers and KL controllers: they train, and resume bitwise."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training import RLHFTrainer, get_optimizer_and_scheduler

OPTIMIZERS = {
    "SGD": partial(SGD, lr=1e-2),
    "SGD with momentum": partial(SGD, lr=1e-2, momentum=0.9),
    "Adagrad": partial(Adagrad, lr=1e-3),
    "RMSprop": partial(RMSprop, lr=1e-4),
    "NAdam": partial(NAdam, lr=1e-4),
    "AdamW, amsgrad": partial(AdamW, lr=1e-4, amsgrad=True),
}


@pytest.fixture
def trainer_with(make_trainer, reel_args):
    """Makes trainers with a custom optimizer and schedule."""

    def make(build, schedule=None, **fields) -> RLHFTrainer:
        policy = load_policy_and_critic(reel_args(**fields), torch.device("cpu"))
        optimizer = build(policy.parameters())
        parts = {"policy": policy, "optimizer": optimizer}
        if schedule is not None:
            parts["scheduler"] = schedule(optimizer)
        return make_trainer(parts, **fields)

    return make


@pytest.mark.slow
def test_passed_adamw_equals_the_built_in_one(make_trainer, reel_args, load_metrics):
    fields = {"total_phases": 3}
    policy = load_policy_and_critic(reel_args(**fields), torch.device("cpu"))
    optimizer, scheduler = get_optimizer_and_scheduler(reel_args(**fields), policy)
    own = make_trainer(dict(policy=policy, optimizer=optimizer, scheduler=scheduler), **fields)
    plain = make_trainer(**fields)
    own.train()
    plain.train()
    for a, b in zip(own.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    rates = [(line["base_lr"], line["head_lr"]) for line in load_metrics(own.run.path)]
    assert rates == [(line["base_lr"], line["head_lr"]) for line in load_metrics(plain.run.path)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_maximize_the_objective(trainer_with, name):
    """One phase on one rollout, with the mean reward dominating the objective."""
    trainer = trainer_with(
        OPTIMIZERS[name], kl_coef=0.0, batch_size=32, batches_per_learning_phase=6
    )
    first: list[float] = []
    trainer.on("after_step")(lambda ctx: first.append(ctx.terms.clipped_surrogate.item()))
    trainer.run_phase()
    assert sum(first[-2:]) > sum(first[:2])
    assert all(group["maximize"] for group in trainer.optimizer.param_groups)


def cut(trainer: RLHFTrainer, **parts) -> RLHFTrainer:
    """Save a run after its second phase, and resume it in a new trainer."""
    for _ in range(2):
        trainer.run_phase()
    trainer.recorder.break_off()
    return RLHFTrainer.resume(trainer.run.path, **parts)


def assert_same_run(found: RLHFTrainer, expected: RLHFTrainer, load_metrics) -> None:
    assert load_metrics(found.run.path) == load_metrics(expected.run.path)
    for a, b in zip(found.policy.parameters(), expected.policy.parameters(), strict=True):
        assert torch.equal(a, b)


class Scale:
    """A callable with state, for LambdaLR."""

    def __init__(self):
        self.calls = 0

    def __call__(self, phase):
        self.calls += 1
        return 1 / (1 + self.calls)


def warmup_then_cosine(optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=3)]
    return SequentialLR(optimizer, parts, milestones=[1])


def chained(optimizer):
    return ChainedScheduler([StepLR(optimizer, 1, 0.5), ExponentialLR(optimizer, 0.9)], optimizer)


SCHEDULES = {
    "constant": None,
    "step": partial(StepLR, step_size=1, gamma=0.5),
    "multi-step": partial(MultiStepLR, milestones=[1, 3], gamma=0.3),
    "cosine": partial(CosineAnnealingLR, T_max=3),
    "restarts": partial(CosineAnnealingWarmRestarts, T_0=2),
    "lambda": partial(LambdaLR, lr_lambda=lambda phase: 1 / (1 + phase)),
    "stateful lambda": lambda optimizer: LambdaLR(optimizer, Scale()),
    "multiplied": partial(MultiplicativeLR, lr_lambda=lambda phase: 0.7),
    "sequential": warmup_then_cosine,
    "chained": chained,
    "one cycle": partial(OneCycleLR, max_lr=1e-2, total_steps=5),
    "cyclic": partial(CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=2),
}
PAIRS = [(name, None) for name in OPTIMIZERS] + [("SGD with momentum", s) for s in SCHEDULES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_resumed_run_equals_uninterrupted_run(
    trainer_with, reel_args, load_metrics, name, schedule
):
    make, fields = SCHEDULES.get(schedule), {"total_phases": 4, "save_every": 1}
    whole = trainer_with(OPTIMIZERS[name], make, **fields)
    whole.train()
    policy = load_policy_and_critic(reel_args(**fields), torch.device("cpu"))
    parts = {"policy": policy, "optimizer": OPTIMIZERS[name](policy.parameters())}
    if make is not None:
        parts["scheduler"] = make(parts["optimizer"])
    resumed = cut(trainer_with(OPTIMIZERS[name], make, **fields), **parts)
    assert resumed.phase == 2
    resumed.train()
    assert_same_run(resumed, whole, load_metrics)


class IntegralController:
    """A controller whose coefficient depends on all KLs so far."""

    def __init__(self):
        self.kl_coef, self.kls = 0.3, []

    def update(self, kl_per_sequence, n_sequences):
        self.kls.append(kl_per_sequence)
        self.kl_coef = 0.3 + sum(self.kls)


@pytest.mark.slow
def test_custom_controller_resumes_with_all_of_its_state(make_trainer, load_metrics):
    whole = make_trainer({"kl_controller": IntegralController()}, total_phases=4)
    whole.train()
    halved = make_trainer({"kl_controller": IntegralController()}, total_phases=4)
    resumed = cut(halved, kl_controller=IntegralController())
    assert len(resumed.kl_controller.kls) == 2
    resumed.train()
    assert_same_run(resumed, whole, load_metrics)


@pytest.mark.slow
def test_resume_rejects_other_custom_components(trainer_with, reel_args):
    trainer = trainer_with(OPTIMIZERS["SGD"], total_phases=3, save_every=1)
    for _ in trainer:
        trainer.request_stop()
    resume = partial(RLHFTrainer.resume, trainer.run.path)
    with pytest.raises(RunError, match="custom components: optimizer, policy"):
        resume()
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    groups = [{"params": [p]} for p in policy.parameters()]
    with pytest.raises(RunError, match="different number of parameter groups"):
        resume(policy=policy, optimizer=SGD(groups, lr=1e-2))
    with pytest.raises(RunError, match="trained with optimizer=SGD, and this trainer has Adagrad"):
        resume(policy=policy, optimizer=Adagrad(policy.parameters()))
    optimizer = SGD(policy.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match="base_lr cannot change with a custom optimizer"):
        resume({"base_lr": 1e-5}, policy=policy, optimizer=optimizer)


class Opaque(StepLR):
    """A scheduler with state that a checkpoint cannot store."""

    def __init__(self, optimizer):
        self.rule = print
        super().__init__(optimizer, 1)


def test_state_that_cannot_be_saved_is_rejected_at_construction(trainer_with, make_trainer):
    with pytest.raises(ConfigError, match="scheduler.rule is a builtin_function_or_method, which"):
        trainer_with(OPTIMIZERS["SGD"], Opaque)
    controller = IntegralController()
    controller.kls = {0.1}
    with pytest.raises(ConfigError, match="kl_controller.kls is a set, which a checkpoint cannot"):
        make_trainer({"kl_controller": controller})


class Lion(torch.optim.Optimizer):
    """An optimizer without the option maximize."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})


def test_trainer_rejects_unfit_optimizers(make_trainer, reel_args):
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    other = load_policy_and_critic(reel_args(), torch.device("cpu"))
    own, foreign = AdamW(policy.parameters()), AdamW(other.parameters())
    cases = [
        (dict(optimizer=foreign), {}, "parameters are not the policy's"),
        (dict(policy=policy, optimizer=foreign), {}, "parameters are not the policy's"),
        (dict(policy=policy, optimizer=Lion(policy.parameters())), {}, "Lion has no option"),
        (dict(scheduler=StepLR(own, 1)), {}, "without its optimizer"),
        (
            dict(policy=policy, optimizer=own, scheduler=StepLR(foreign, 1)),
            {},
            "belongs to another",
        ),
        (
            dict(policy=policy, optimizer=own),
            dict(optimizer_in_backward=True, max_grad_norm=None),
            "require the optimizer of the settings",
        ),
        (dict(policy=policy, lr_scheduler=StepLR(own, 1)), {}, "no component 'lr_scheduler'"),
    ]
    for parts, fields, complaint in cases:
        with pytest.raises(ConfigError, match=complaint):
            make_trainer(parts, **fields)
