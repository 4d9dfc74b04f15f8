"""KL controllers, and custom optimizers and schedules; test_resume.py has resumed runs of them."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import AdaptiveKLController, FixedKLController, RLHFTrainer
from tests.training.recorded_runs import IntegralController, make_optimizer, train_partly

make_sgd = partial(make_optimizer, partial(SGD, lr=1e-2, momentum=0.9))
make_adamw = partial(make_optimizer, AdamW)


@pytest.mark.slow
def test_custom_optimizer_maximizes_the_objective(make_trainer):
    """One phase on one rollout, with the mean reward dominating the objective."""
    fields = {"kl_coef": 0.0, "batch_size": 32, "batches_per_learning_phase": 6}
    trainer = make_trainer(make_sgd(), **fields)
    terms: list[float] = []
    trainer.on("after_step")(lambda ctx: terms.append(ctx.terms.clipped_surrogate.item()))
    trainer.optimizer.param_groups[0]["lr"] = 0.011
    assert trainer.run_phase().base_lr == 0.011
    assert sum(terms[-2:]) > sum(terms[:2])


@pytest.mark.slow
def test_resume_rejects_other_custom_components(make_trainer):
    path = train_partly(make_trainer(make_sgd()), 1)
    split = lambda parameters: SGD([{"params": [p]} for p in parameters], lr=1e-2)
    for changes, parts, words in (
        ({}, {}, "custom components: optimizer, policy"),
        ({}, make_sgd() | {"true_reward_fn": len}, "without a custom true_reward_fn"),
        ({}, make_sgd() | {"total_phases": 3}, "Pass {'total_phases': ...} as changes"),
        ({}, make_optimizer(split), "different number of parameter groups"),
        ({}, make_optimizer(Adagrad), "trained with optimizer=SGD, and this trainer has Adagrad"),
        ({"base_lr": 1e-5}, make_sgd(), "base_lr cannot change with a custom optimizer"),
    ):
        with pytest.raises((ConfigError, RunError), match=words):
            RLHFTrainer.resume(path, changes, **parts)


class Lion(torch.optim.Optimizer):
    """An optimizer without the option maximize."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})


@pytest.mark.slow
@pytest.mark.typed
def test_trainer_rejects_unfit_components(make_trainer):
    parts, other = make_adamw(), make_adamw()
    policy, optimizer, foreign = parts["policy"], parts["optimizer"], other["optimizer"]
    controller = IntegralController()
    controller.seen = {0.1}
    in_backward = dict(optimizer_in_backward=True, max_grad_norm=None)
    cases = [
        (dict(optimizer=foreign), {}, "parameters are not the policy's"),
        (dict(policy=policy, optimizer=Lion(policy.parameters())), {}, "Lion has no option"),
        (dict(scheduler=StepLR(optimizer, 1)), {}, "optimizer=None is not an optimizer"),
        (parts | dict(scheduler=StepLR(foreign, 1)), {}, "does not belong to"),
        (parts | dict(scheduler=ReduceLROnPlateau(optimizer)), {}, "requires a metric.*LambdaLR"),
        (parts, in_backward, "require the optimizer of the settings"),
        (dict(kl_controller=object()), {}, r"needs kl_coef >= 0 and update"),
        (dict(kl_controller=FixedKLController(-0.1)), {}, "kl_coef=-0.1"),
        (dict(kl_controller=controller), {}, "kl_controller.seen is a set, which a checkpoint"),
    ]
    for components, fields, complaint in cases:
        with pytest.raises(ConfigError, match=complaint):
            make_trainer(components, **fields)


@pytest.mark.slow
def test_custom_controller_sets_the_coefficient(runs):
    run = runs("custom controller")
    kls = [report.kl_per_sequence for report in run.reports]
    assert run.trainer.kl_controller.seen == [(kl, 8) for kl in kls]
    assert [report.kl_coef for report in run.reports] == [0.3 + sum(kls[:n]) for n in range(4)]


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
    with pytest.raises(ConfigError, match="target=-6.0 is out of range"):
        AdaptiveKLController(0.2, target=-6.0, horizon=10_000)
    assert [FixedKLController(0.3).update(kl, 64) for kl in (0.0, 6.0, 1e9)] == [0.3, 0.3, 0.3]
