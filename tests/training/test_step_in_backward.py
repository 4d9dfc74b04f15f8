"""Stepping each weight as its gradient arrives: the weights, the memory, and what it refuses."""

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.optimization import PolicyUpdate, StepInBackward

IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"value_head": "separate"},
        {"lora_rank": 2},
        {"precision": "bf16"},
        {"activation_checkpointing": True},
        {"ratio_threshold": 1e6, "target_kl": 1e6},
    ],
    ids=str,
)
def test_a_run_ends_with_the_weights_of_the_plain_run_without_clipping(
    make_trainer, parameters_of, metrics_of, fields
):
    """To the bit: a step of AdamW looks at one weight's gradient and moments only."""
    plain = make_trainer(max_grad_norm=None, **fields)
    stepping = make_trainer(**IN_BACKWARD, **fields)
    for trainer in (plain, stepping):
        trainer.train()
    ours, theirs = parameters_of(stepping.policy), parameters_of(plain.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for line, other in zip(metrics_of(stepping.run.path), metrics_of(plain.run.path), strict=True):
        assert line == other | {"grad_norm": pytest.approx(other["grad_norm"], rel=1e-5)}


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes comes with the extra eightbit",
)
def test_8_bit_moments_step_in_the_backward_pass_too(make_trainer, parameters_of):
    ends = []
    for fields in ({"max_grad_norm": None}, IN_BACKWARD):
        trainer = make_trainer(optimizer="adamw_8bit", **fields)
        trainer.train()
        ends.append(parameters_of(trainer.policy))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def peak_gradient_bytes(trainer: RLHFTrainer) -> int:
    """The most bytes of gradients at once: those that are kept, and the one that arrives."""
    parameters, peak = list(trainer.policy.parameters()), [0]

    def arrived(gradient: torch.Tensor) -> None:
        kept = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        peak[0] = max(peak[0], kept + gradient.nbytes)

    for parameter in parameters:
        parameter.register_hook(arrived)
    trainer.learning_phase(trainer.rollout_phase())
    return peak[0]


@pytest.mark.slow
def test_gradients_are_never_all_in_memory(make_trainer):
    """All of them without it; the largest one with it."""
    trainer = make_trainer(max_grad_norm=None)
    sizes = [p.nbytes for p in trainer.policy.parameters()]
    assert peak_gradient_bytes(trainer) == sum(sizes)
    assert peak_gradient_bytes(make_trainer(**IN_BACKWARD)) == max(sizes)


def test_a_backward_pass_of_the_callers_own_steps_nothing(make_trainer, parameters_of):
    trainer = make_trainer(**IN_BACKWARD)
    before = parameters_of(trainer.policy)
    trainer.policy(torch.tensor([[4, 5, 6]]))[0].sum().backward()
    after = parameters_of(trainer.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(p.grad is not None for p in trainer.policy.parameters())


def test_what_a_step_does_by_hand():
    """SGD at rate 0.5 on x^2 / 2 + 3 y: x = 4 - 0.5 * 4, y = 1 - 0.5 * 3, norm (16 + 9)^0.5 = 5."""
    weights = nn.ParameterDict({"x": torch.tensor(4.0), "y": torch.tensor(1.0)})
    optimizer = torch.optim.SGD(weights.values(), lr=0.5)
    objective = weights["x"].square() / 2 + 3 * weights["y"]
    trainer = SimpleNamespace(optimizer=optimizer, step_in_backward=StepInBackward(optimizer))
    update = PolicyUpdate(trainer, _finite=torch.tensor(True))
    norm = trainer.step_in_backward.climb(objective, update)
    assert (weights["x"].item(), weights["y"].item(), norm.item()) == (2.0, -0.5, 5.0)
    assert weights["x"].grad is None and len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_leaves_its_weight_and_stops_the_run(make_trainer):
    """A KL of 0 under a root is 0 with gradient 0 * inf = nan."""

    def rooted(kl, kl_coef, mask):
        return (0.0 * F.calc_kl_penalty(kl, kl_coef, mask)).sqrt()

    trainer = make_trainer({"kl_penalty": rooted}, **IN_BACKWARD)
    with pytest.raises(RunError, match="gradient norm became nan in phase 0"):
        trainer.run_phase()
    assert all(p.isfinite().all() for p in trainer.policy.parameters())


@pytest.mark.slow
def test_an_objective_that_is_not_finite_steps_nothing(make_trainer, parameters_of):
    def spoiled(kl, kl_coef, mask):
        return F.calc_kl_penalty(kl, kl_coef, mask) + math.inf

    trainer = make_trainer({"kl_penalty": spoiled}, **IN_BACKWARD)
    before = parameters_of(trainer.policy)
    with pytest.raises(RunError, match="objective became -inf in phase 0"):
        trainer.run_phase()
    after = parameters_of(trainer.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_resumed_run_ends_like_the_one_that_was_not_stopped(
    make_trainer, parameters_of, broken_off_and_resumed
):
    whole, halved = (make_trainer(total_phases=3, **IN_BACKWARD) for _ in range(2))
    whole.train()
    resumed = broken_off_and_resumed(halved)
    theirs, ours = parameters_of(whole.policy), parameters_of(resumed.policy)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0"),
        ({"micro_batch_size": 2}, "micro_batch_size=2"),
    ],
    ids=str,
)
def test_what_needs_all_gradients_at_once_is_refused(reel_args, fields, sentence):
    with pytest.raises(
        ConfigError, match=f"{sentence} cannot .*optimizer_in_backward=True. Set it to None"
    ):
        reel_args(**(IN_BACKWARD | fields))


@pytest.mark.slow
def test_steps_after_one_that_was_not_finite_are_not_taken(make_trainer, parameters_of):
    """The second of 4 minibatches is spoiled: the weights are those after the first step."""
    calls = []

    def spoiled(kl, kl_coef, mask):
        calls.append(1)
        spoil = math.nan if len(calls) == 2 else 0.0
        return F.calc_kl_penalty(kl, kl_coef, mask) + spoil

    trainer, ends = make_trainer({"kl_penalty": spoiled}), []
    trainer.on("after_step")(lambda ctx: ends.append(parameters_of(ctx.policy)))
    with pytest.raises(RunError, match="objective became nan"):
        trainer.learning_phase(trainer.rollout_phase())
    now = parameters_of(trainer.policy)
    assert len(ends) == 4
    assert all(torch.equal(now[name], ends[0][name]) for name in now)
