"""Stepping each weight as its gradient arrives: weights, memory, and rejected settings."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_lab import functional as F
from rlhf_lab.errors import RunError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.optimization import PolicyUpdate, StepInBackward
from tests.training.recorded_runs import IN_BACKWARD, copy_weights, is_equal


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"value_head": "separate", "activation_checkpointing": True, "precision": "bf16"},
        {"lora_rank": 2, "ratio_threshold": 1e6, "target_kl": 1e6},
    ],
    ids=str,
)
def test_weights_equal_those_of_the_plain_run_without_clipping(make_trainer, fields):
    """Bitwise: a step of AdamW depends on one weight's gradient and moments only.

    Limits that are never reached change nothing.
    """
    limits = dict.fromkeys(("ratio_threshold", "target_kl"))
    plain = make_trainer(max_grad_norm=None, **fields | limits)
    stepping = make_trainer(**IN_BACKWARD, **fields)
    lines = [vars(trainer.learning_phase(trainer.rollout_phase())) for trainer in (plain, stepping)]
    assert is_equal(copy_weights(stepping.policy), copy_weights(plain.policy))
    norm = lines[0]["grad_norm"]
    assert lines[1] == lines[0] | {"grad_norm": pytest.approx(norm, rel=1e-5)}


def peak_gradient_bytes(trainer: RLHFTrainer) -> int:
    """Return the most bytes of gradients at once: those kept, and the one that arrives."""
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
    trainer = make_trainer(max_grad_norm=None)
    sizes = [p.nbytes for p in trainer.policy.parameters()]
    assert peak_gradient_bytes(trainer) == sum(sizes)
    assert peak_gradient_bytes(make_trainer(**IN_BACKWARD)) == max(sizes)


@pytest.mark.parametrize("phases", [0, 1])
def test_other_backward_passes_step_nothing(make_trainer, phases):
    """Before the first step and after the last."""
    trainer = make_trainer(**IN_BACKWARD)
    for _ in range(phases):
        trainer.learning_phase(trainer.rollout_phase())
    before = copy_weights(trainer.policy)
    trainer.policy(torch.tensor([[4, 5, 6]]))[0].sum().backward()
    assert is_equal(copy_weights(trainer.policy), before)
    assert any(p.grad is not None for p in trainer.policy.parameters())


def test_step_matches_hand_computed():
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
@pytest.mark.parametrize("fields", [{}, IN_BACKWARD], ids=["plain", "in backward"])
def test_no_step_follows_an_objective_that_is_not_finite(make_trainer, fields):
    """The second of 4 minibatches is spoiled: the weights are those after the first step."""
    calls, ends = [], []

    def spoiled(kl, kl_coef, mask):
        calls.append(1)
        return F.calc_kl_penalty(kl, kl_coef, mask) + (math.nan if len(calls) == 2 else 0.0)

    trainer = make_trainer({"kl_penalty": spoiled}, **fields)
    trainer.on("after_step")(lambda ctx: ends.append(copy_weights(ctx.policy)))
    with pytest.raises(RunError, match="objective became nan"):
        trainer.learning_phase(trainer.rollout_phase())
    assert len(ends) == 4 and is_equal(copy_weights(trainer.policy), ends[0])
