"""KL controllers; custom optimizers, schedules and controllers train and resume bitwise."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    SequentialLR,
    StepLR,
)

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training import AdaptiveKLController, FixedKLController, RLHFTrainer
from tests.training.recorded_runs import copy_weights, is_equal, read_metrics, train_partly

OPTIMIZERS = {
    "SGD": partial(SGD, lr=1e-2, momentum=0.9),
    "RMSprop": partial(RMSprop, lr=1e-4),
    "NAdam": partial(NAdam, lr=1e-4),
}


@pytest.fixture
def custom(reel_args):
    """Builds a policy with a custom optimizer and schedule."""

    def make(build, schedule=None) -> dict[str, object]:
        policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
        parts = {"policy": policy, "optimizer": build(policy.parameters())}
        return parts | ({} if schedule is None else {"scheduler": schedule(parts["optimizer"])})

    return make


@pytest.mark.slow
def test_custom_optimizer_maximizes_the_objective(make_trainer, custom):
    """One phase on one rollout, with the mean reward dominating the objective."""
    fields = {"kl_coef": 0.0, "batch_size": 32, "batches_per_learning_phase": 6}
    trainer = make_trainer(custom(OPTIMIZERS["SGD"]), **fields)
    terms: list[float] = []
    trainer.on("after_step")(lambda ctx: terms.append(ctx.terms.clipped_surrogate.item()))
    trainer.run_phase()
    assert sum(terms[-2:]) > sum(terms[:2])


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


SCHEDULES = {
    "stateful lambda": lambda optimizer: LambdaLR(optimizer, Scale()),
    "sequential": warmup_then_cosine,
    "chained": lambda o: ChainedScheduler([StepLR(o, 1, 0.5), ExponentialLR(o, 0.9)], o),
}
PAIRS = [("RMSprop", "stateful lambda"), ("NAdam", "sequential")]
PAIRS.append(pytest.param("SGD", "chained", marks=pytest.mark.nightly))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_resumed_run_equals_uninterrupted_run(make_trainer, custom, name, schedule):
    parts = [custom(OPTIMIZERS[name], SCHEDULES.get(schedule)) for _ in range(3)]
    whole, halved = (make_trainer(part, total_phases=4) for part in parts[:2])
    train_partly(whole, 4)
    again = RLHFTrainer.resume(train_partly(halved, 2), **parts[2])
    train_partly(again, 2)
    assert all(group["maximize"] for group in again.optimizer.param_groups)
    assert read_metrics(again.run.path) == read_metrics(whole.run.path)
    assert is_equal(copy_weights(again.policy), copy_weights(whole.policy))


class IntegralController:
    """A controller whose coefficient depends on all KLs so far; its update returns None."""

    def __init__(self):
        self.kl_coef, self.seen = 0.3, []

    def update(self, kl_per_sequence, n_sequences):
        self.seen.append((kl_per_sequence, n_sequences))
        self.kl_coef = 0.3 + sum(kl for kl, _ in self.seen)


@pytest.mark.slow
def test_custom_controller_sets_the_coefficient_when_resumed_too(make_trainer):
    parts = [{"kl_controller": IntegralController()} for _ in range(3)]
    whole, halved = (make_trainer(part, total_phases=4) for part in parts[:2])
    reports = whole.train()
    kls = [report.kl_per_sequence for report in reports]
    assert whole.kl_controller.seen == [(kl, 8) for kl in kls]
    assert [report.kl_coef for report in reports] == [0.3 + sum(kls[:n]) for n in range(4)]
    again = RLHFTrainer.resume(train_partly(halved), **parts[2])
    again.train()
    assert vars(again.kl_controller) == vars(whole.kl_controller)
    assert read_metrics(again.run.path) == read_metrics(whole.run.path)


@pytest.mark.slow
def test_resume_rejects_other_custom_components(make_trainer, custom):
    path = train_partly(make_trainer(custom(OPTIMIZERS["SGD"])), 1)
    resume = partial(RLHFTrainer.resume, path)
    with pytest.raises(RunError, match="custom components: optimizer, policy"):
        resume()
    with pytest.raises(RunError, match="without a custom true_reward_fn"):
        resume(true_reward_fn=len, **custom(OPTIMIZERS["SGD"]))
    with pytest.raises(RunError, match="different number of parameter groups"):
        resume(**custom(lambda parameters: SGD([{"params": [p]} for p in parameters], lr=1e-2)))
    with pytest.raises(RunError, match="trained with optimizer=SGD, and this trainer has Adagrad"):
        resume(**custom(Adagrad))
    with pytest.raises(ConfigError, match="base_lr cannot change with a custom optimizer"):
        resume({"base_lr": 1e-5}, **custom(OPTIMIZERS["SGD"]))


class Opaque(StepLR):
    """A scheduler with state that a checkpoint cannot store."""

    def __init__(self, optimizer):
        self.rule = print
        super().__init__(optimizer, 1)


class Lion(torch.optim.Optimizer):
    """An optimizer without the option maximize."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})


@pytest.mark.slow
@pytest.mark.typed
def test_trainer_rejects_unfit_components(make_trainer, custom):
    parts, other = custom(AdamW), custom(AdamW)
    policy, optimizer, foreign = parts["policy"], parts["optimizer"], other["optimizer"]
    controller = IntegralController()
    controller.seen = {0.1}
    in_backward = dict(optimizer_in_backward=True, max_grad_norm=None)
    cases = [
        (dict(optimizer=foreign), {}, "parameters are not the policy's"),
        (dict(policy=policy, optimizer=foreign), {}, "parameters are not the policy's"),
        (dict(policy=policy, optimizer=Lion(policy.parameters())), {}, "Lion has no option"),
        (dict(scheduler=StepLR(optimizer, 1)), {}, "without its optimizer"),
        (parts | dict(scheduler=StepLR(foreign, 1)), {}, "belongs to another"),
        (parts, in_backward, "require the optimizer of the settings"),
        (dict(lr_scheduler=StepLR(optimizer, 1)), {}, "no component 'lr_scheduler'"),
        (custom(AdamW, Opaque), {}, "scheduler.rule is a builtin_function_or_method, which"),
        (dict(kl_controller=object()), {}, r"needs kl_coef and update\(\)"),
        (dict(kl_controller=controller), {}, "kl_controller.seen is a set, which a checkpoint"),
    ]
    for components, fields, complaint in cases:
        with pytest.raises(ConfigError, match=complaint):
            make_trainer(components, **fields)


def test_adaptive_coefficient_matches_hand_computed():
    """KL 6.6 of target 6: error 0.1; 256 sequences of 10,000: 0.2 * (1 + 0.1 * 0.0256) = 0.200512.

    KL 60 and 0: the error is limited to 0.2 and -0.2. On target, nothing changes.
    """
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10_000)
    assert controller.update(6.6, 256) == pytest.approx(0.200512, abs=1e-12)
    assert controller.update(60.0, 256) == pytest.approx(0.20153862144, abs=1e-12)
    assert controller.update(0.0, 256) == pytest.approx(0.20153862144 * 0.99488, abs=1e-12)
    before = controller.kl_coef
    assert controller.update(6.0, 256) == before
    for kl in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"must be finite, got {kl}"):
            controller.update(kl, 256)
    assert controller.kl_coef == before
    assert [FixedKLController(0.3).update(kl, 64) for kl in (0.0, 6.0, 1e9)] == [0.3, 0.3, 0.3]


def test_adaptive_controller_reads_nats_per_sequence(runs):
    """With nats per token, a sixth of it, the coefficient would only fall."""
    run = runs("state")
    args = run.trainer.args
    expected = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
    for report in run.reports:
        assert report.kl_coef == expected.kl_coef
        expected.update(report.kl_per_sequence, args.batch_size)
    assert expected.kl_coef == run.trainer.kl_controller.kl_coef > run.reports[1].kl_coef
    assert run.reports[1].kl_coef < run.reports[0].kl_coef
