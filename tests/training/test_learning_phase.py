"""Learning: minibatches, clipping, micro-batches, checkpointing, and reads from the device."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.forward import recomputing_blocks
from rlhf_lab.training import Context, ReplayMemory, objective_terms
from rlhf_lab.training.optimization import PolicyUpdate, StepInBackward
from tests.training.recorded_runs import move_weights


def test_minibatches_start_without_gradients(runs):
    """Only the first minibatch is learned by the policy that sampled it."""
    run = runs("plain")
    assert len(run.has_gradients) == 4 * 5 and not any(run.has_gradients)
    for report in run.reports:
        assert report.ratio_first_minibatch == pytest.approx(1, abs=1e-4)
    assert run.reports[1].approx_kl_per_token > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("in_step", [False, True])
def test_clip_scales_gradients_of_model_and_value_head(monkeypatch, in_step):
    """Gradients of 1 in 6 + 3 numbers have norm 3, and 1/2 of norm 1.5; on CUDA after the step."""
    monkeypatch.setattr("rlhf_lab.training.optimization.CLIPS_IN_STEP", ("cpu",) * in_step)
    policy = nn.ModuleDict({"base_model": nn.Linear(2, 2), "value_head": nn.Linear(2, 1)}).double()
    policy.base_model = policy["base_model"]
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    parts = {"step_in_backward": None, "policy": policy, "phase": 1, "optimizer": optimizer}
    update = PolicyUpdate(SimpleNamespace(**parts, world=None))
    assert update.clip(1.5).item() == pytest.approx(3)
    update.step()
    for parameter in policy.parameters():
        found = torch.stack([parameter.grad, 10 * optimizer.state[parameter]["exp_avg"]])
        torch.testing.assert_close(found, torch.full_like(found, 0.5), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_step_in_backward_steps_while_it_climbs_only():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0, maximize=True)
    climber = StepInBackward(optimizer)
    update = PolicyUpdate(SimpleNamespace(step_in_backward=climber, optimizer=optimizer))
    assert climber.climb(3 * weight.sum(), update).item() == 3
    assert weight.item() == pytest.approx(1.1) and weight.grad is None
    (3 * weight.sum()).backward()
    assert weight.item() == pytest.approx(1.1) and weight.grad.item() == 3


SETTINGS = {
    "sequence_mean": {"loss_aggregation": "sequence_mean", "vf_clip": 0.01},
    "constant": {"loss_aggregation": "constant", "normalize_advantages": False, "top_k": 5},
    "gspo": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
    "k3": {"kl_estimator": "k3", "clip_coef_high": 0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("part_size", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_split_changes_neither_value_nor_gradient(make_trainer, setting, part_size):
    """The first of 8 responses has no token, and others have fewer than 6."""
    fields = {"num_minibatches": 1, "batches_per_learning_phase": 1, "ent_coef": 0.3}
    learned = []
    for micro_batch_size in (None, part_size):
        gradients: dict[str, Tensor] = {}
        trainer = make_trainer(micro_batch_size=micro_batch_size, **fields, **SETTINGS[setting])
        rollout = trainer.rollout_phase()
        rollout.samples.mask[:4] = torch.arange(6) < torch.tensor([[0], [2], [3], [5]])
        move_weights(trainer.policy)
        trainer.on("after_backward")(lambda ctx, into=gradients: into.update(copy_gradients(ctx)))
        stats = trainer.learning_phase(rollout)
        learned.append((dataclasses.asdict(stats), gradients))
    (whole, expected), (parts, found) = learned
    assert parts == pytest.approx(whole, rel=1e-4, abs=2e-5)
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert found.keys() == expected.keys() and largest > 0
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 2e-5 * max(largest, 1.0), name


def copy_gradients(ctx: Context) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in ctx.policy.named_parameters()}


RECOMPUTED = {"activation_checkpointing": True}


@pytest.mark.slow
def test_activation_checkpointing_keeps_fewer_bytes(make_trainer):
    """test_equal_runs.py has runs with equal weights."""
    totals = []
    for fields in ({}, RECOMPUTED):
        trainer, sizes = make_trainer(gen_len=26, **fields), []
        rollout = trainer.rollout_phase()
        minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator()))
        keep_size = lambda x, sizes=sizes: sizes.append(x.nbytes) or x
        with torch.autograd.graph.saved_tensors_hooks(keep_size, lambda x: x):
            objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
        totals.append(sum(sizes))
    assert totals[1] < 0.6 * totals[0]


@pytest.mark.slow
def test_hooks_in_a_block_raise(make_trainer):
    """Before a run is written, and between forward and backward. Hooks outside blocks fire once."""
    trainer, seen = make_trainer(**RECOMPUTED), []
    model, rollout = trainer.policy.base_model, trainer.rollout_phase()
    model.add_hook("ln_final.hook_normalized", lambda x, hook: seen.append(x.requires_grad))
    trainer.learning_phase(rollout)
    assert seen == [True] * 4
    model.add_hook("blocks.1.hook_resid_post", lambda x, hook: x)
    with pytest.raises(ConfigError, match="activation_checkpointing=True.*blocks.1.*second"):
        trainer.run_phase()
    assert trainer.run is None
    model.reset_hooks()
    with recomputing_blocks(model):
        logits = model(torch.tensor([[4, 5, 6]]))
    assert "forward" not in vars(model.blocks[0])
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: 2 * x)
    with pytest.raises(ConfigError, match="fire a second time"):
        logits.sum().backward()


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads one by one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


PPO = {"num_minibatches": 4, "batches_per_learning_phase": 3, "top_k": 5, "vf_clip": 0.1}
GSPO = {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "kl_estimator": "k3"}
ONE_READ = [
    PPO | {"clip_coef_high": 0.3, "dual_clip": 3.0},
    GSPO | {"micro_batch_size": 1, "precision": "bf16"},
    {"max_grad_norm": None, "optimizer_in_backward": True, "activation_checkpointing": True},
    {"target_kl": 1e6},
    {"ratio_threshold": 1e6},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", ONE_READ, ids=str)
def test_learning_phase_reads_its_numbers_once(make_trainer, fields):
    """At its start, whether prompts are padded; at its end, all statistics as one list.

    With a limit, the host also decides in each of 4 minibatches whether to step.
    """
    trainer = make_trainer({"prompts": ["this movie", "the film was", "this film"]}, **fields)
    rollout = trainer.rollout_phase()
    assert next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator())).padded
    trainer.learning_phase(rollout)  # on CUDA, captures a graph
    with Reads() as reads:
        trainer.learning_phase(rollout)
    assert reads.count == 1 + 4 * bool({"target_kl", "ratio_threshold"} & fields.keys())
