"""An optimiser and a schedule of the caller's own: they raise the objective, and are resumed."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training import RLHFTrainer, get_optimizer_and_scheduler

OPTIMIZERS = {
    "SGD": partial(SGD, lr=1e-2),
    "SGD with momentum": partial(SGD, lr=1e-2, momentum=0.9),
    "Adagrad": partial(Adagrad, lr=1e-3),
    "RMSprop": partial(RMSprop, lr=1e-4),
    "AdamW, amsgrad": partial(AdamW, lr=1e-4, amsgrad=True),
}


@pytest.fixture
def trainer_with(make_trainer, reel_args):
    """Makes trainers whose optimiser and schedule are the caller's."""

    def make(build, schedule=None, **fields) -> RLHFTrainer:
        policy = load_policy_and_critic(reel_args(**fields), torch.device("cpu"))
        optimizer = build(policy.parameters())
        parts = {"policy": policy, "optimizer": optimizer}
        if schedule is not None:
            parts["scheduler"] = schedule(optimizer)
        return make_trainer(parts, **fields)

    return make


@pytest.mark.slow
def test_the_own_adamw_of_a_run_trains_as_the_runs_own_does(make_trainer, reel_args, metrics_of):
    """Handed in, what the settings describe comes to the same weights, bit for bit."""
    fields = {"total_phases": 3}
    policy = load_policy_and_critic(reel_args(**fields), torch.device("cpu"))
    optimizer, scheduler = get_optimizer_and_scheduler(reel_args(**fields), policy)
    own = make_trainer(dict(policy=policy, optimizer=optimizer, scheduler=scheduler), **fields)
    plain = make_trainer(**fields)
    own.train()
    plain.train()
    for a, b in zip(own.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    rates = [(line["base_lr"], line["head_lr"]) for line in metrics_of(own.run.path)]
    assert rates == [(line["base_lr"], line["head_lr"]) for line in metrics_of(plain.run.path)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_of_torchs_raises_the_objective(trainer_with, name):
    """One phase on one rollout, on which the mean reward is worth more than everything else."""
    trainer = trainer_with(
        OPTIMIZERS[name], kl_coef=0.0, batch_size=32, batches_per_learning_phase=6
    )
    first: list[float] = []
    trainer.on("after_step")(lambda ctx: first.append(ctx.terms.clipped_surrogate.item()))
    trainer.run_phase()
    assert sum(first[-2:]) > sum(first[:2])
    assert all(group["maximize"] for group in trainer.optimizer.param_groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "schedule",
    [
        None,
        partial(StepLR, step_size=1, gamma=0.5),
        partial(CosineAnnealingLR, T_max=3),
        partial(LambdaLR, lr_lambda=lambda phase: 1 / (1 + phase)),
    ],
    ids=["constant", "step", "cosine", "lambda"],
)
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(
    trainer_with, reel_args, metrics_of, name, schedule
):
    fields = {"total_phases": 3, "save_every": 1}
    whole = trainer_with(OPTIMIZERS[name], schedule, **fields)
    whole.train()
    broken_off = trainer_with(OPTIMIZERS[name], schedule, **fields)
    for phase in broken_off:
        if phase.phase == 1:
            broken_off.request_stop()
    policy = load_policy_and_critic(reel_args(**fields), torch.device("cpu"))
    parts = {"policy": policy, "optimizer": OPTIMIZERS[name](policy.parameters())}
    if schedule is not None:
        parts["scheduler"] = schedule(parts["optimizer"])
    resumed = RLHFTrainer.resume(broken_off.run.path, **parts)
    assert resumed.phase == 2
    resumed.train()
    assert metrics_of(resumed.run.path) == metrics_of(whole.run.path)
    for a, b in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_resume_asks_for_the_own_parts_and_refuses_others(trainer_with, reel_args):
    trainer = trainer_with(OPTIMIZERS["SGD"], total_phases=3, save_every=1)
    for _ in trainer:
        trainer.request_stop()
    with pytest.raises(RunError, match="trained with its own optimizer, policy"):
        RLHFTrainer.resume(trainer.run.path)
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    groups = [{"params": [p]} for p in policy.parameters()]
    with pytest.raises(RunError, match="1 parameter groups, and this one has"):
        RLHFTrainer.resume(trainer.run.path, policy=policy, optimizer=SGD(groups, lr=1e-2))
    with pytest.raises(ConfigError, match="base_lr cannot change under your own optimizer"):
        optimizer = SGD(policy.parameters(), lr=1e-2)
        changes = {"base_lr": 1e-5}
        RLHFTrainer.resume(trainer.run.path, changes, policy=policy, optimizer=optimizer)


class Lion(torch.optim.Optimizer):
    """An optimiser without the option maximize."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})


def test_what_does_not_fit_is_refused_in_a_sentence(make_trainer, reel_args):
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    other = load_policy_and_critic(reel_args(), torch.device("cpu"))
    own, foreign = AdamW(policy.parameters()), AdamW(other.parameters())
    cases = [
        (dict(optimizer=foreign), {}, "parameters are not the policy's"),
        (dict(policy=policy, optimizer=foreign), {}, "parameters are not the policy's"),
        (dict(policy=policy, optimizer=Lion(policy.parameters())), {}, "Lion has no option"),
        (dict(scheduler=StepLR(own, 1)), {}, "without its optimizer"),
        (dict(policy=policy, optimizer=own, scheduler=StepLR(foreign, 1)), {}, "of another"),
        (
            dict(policy=policy, optimizer=own),
            dict(optimizer_in_backward=True, max_grad_norm=None),
            "optimizer_in_backward=True needs",
        ),
        (dict(policy=policy, optimizer="adamw"), {}, "optimizer='adamw' is no optimizer"),
        (dict(policy=policy, lr_scheduler=StepLR(own, 1)), {}, "hand in scheduler, with its"),
    ]
    for parts, fields, complaint in cases:
        with pytest.raises(ConfigError, match=complaint):
            make_trainer(parts, **fields)
