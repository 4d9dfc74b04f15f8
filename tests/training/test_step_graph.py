"""The captured learning step and the eager one agree, on the CPU by a replayed tape."""

import sys

import pytest
import torch

from rlhf_lab.functional import get_logprobs
from rlhf_lab.models import decode
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.ppo import objective_terms
from rlhf_lab.training.rollout import ReplayMemory
from rlhf_lab.training.step_graph import StepGraph
from tests.tape import capture_on_tape
from tests.training.recorded_runs import (
    IN_BACKWARD,
    assert_same_run,
    copy_weights,
    is_equal,
    train_partly,
)

DAILY = ("unequal prompts, drawn lengths", "adaptive KL", "ratio_threshold skips", "bf16")
DAILY += ("separate critic, bf16",)
NIGHTLY = ("target_kl stops", "rloo, lora, k3", "kl in reward, k1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*DAILY, *(pytest.param(x, marks=pytest.mark.nightly) for x in NIGHTLY)]
)
def test_replayed_run_matches_eager_run(make_configured, runs, name):
    trainer = make_configured(name)
    graph = trainer.step_graph = StepGraph(trainer, capture_on_tape)
    for _ in range(2):
        trainer.run_phase()
    assert graph.reason is None and 1 <= graph.n_captures <= (2 if "lengths" in name else 1)
    expected, _ = runs(name).after(2)
    torch.testing.assert_close(copy_weights(trainer.policy), expected, atol=1e-7, rtol=1e-6)


@pytest.mark.slow
def test_run_resumed_by_tape_matches_uninterrupted_run(make_trainer, monkeypatch):
    monkeypatch.setattr(decode, "capture", capture_on_tape)
    monkeypatch.setattr(decode, "can_capture", lambda *inputs: True)

    def on_tape(trainer):
        trainer.step_graph = StepGraph(trainer, capture_on_tape)
        return trainer

    whole, interrupted = (on_tape(make_trainer(base_lr=1e-3)) for _ in range(2))
    whole.train()
    resumed = on_tape(RLHFTrainer.resume(train_partly(interrupted, 1)))
    resumed.train()
    for trainer in (whole, resumed):
        assert trainer.step_graph.n_captures == 1 and trainer.forward.sampler is not None
    assert_same_run(resumed.run.path, whole.run.path)


@pytest.mark.slow
def test_callbacks_between_steps_see_and_change_what_runs(make_trainer):
    eager, taped = make_trainer(), make_trainer()
    taped.step_graph = StepGraph(taped, capture_on_tape)
    for trainer in (eager, taped):
        gradients = []

        @trainer.on("after_step")
        def keep(ctx, gradients=gradients):
            gradients.append(ctx.policy.value_head[0].weight.grad)

        @trainer.on("before_minibatch")
        def add_hook(ctx):
            if ctx.phase == 1 and ctx.step == 2:
                double = lambda x, hook: 2 * x
                ctx.policy.base_model.add_hook("blocks.0.hook_mlp_out", double, is_permanent=True)

        for _ in range(2):
            trainer.run_phase()
    assert taped.step_graph.n_captures == 1
    assert len({gradient.sum().item() for gradient in gradients}) > 4  # of 8 steps
    found, expected = copy_weights(taped.policy), copy_weights(eager.policy)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.slow
def test_step_runs_eagerly_while_python_code_takes_part(make_trainer, monkeypatch):
    trainer = make_trainer()
    graph = trainer.step_graph = StepGraph(trainer, capture_on_tape)
    rollout, model = trainer.rollout_phase(), trainer.policy.base_model
    for expected, fields in {
        "cuda_graphs=False": {"cuda_graphs": False},
        "a split minibatch": {"micro_batch_size": 2},
        "optimizer_in_backward": IN_BACKWARD,
        "activation_checkpointing": {"activation_checkpointing": True},
    }.items():
        assert StepGraph(make_trainer(**fields)).phase_obstacle() == expected

    def reason() -> str | None:
        trainer.learning_phase(rollout)
        return graph.reason

    trace = sys.gettrace()
    sys.settrace(lambda *frame: None)
    found = reason()
    sys.settrace(trace)
    assert found == "a debugger"
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: None)]):
        assert reason() == "hooks"
    handle = trainer.policy.value_head[0].weight.register_hook(lambda gradient: gradient / 2)
    assert reason() == "hooks on parameters"
    handle.remove()
    assert graph.n_captures == 0 and reason() is None and graph.n_captures == 1
    trainer.on("after_loss")(lambda ctx: None)
    assert reason() == "a callback of after_loss"
    custom = make_trainer({"logprobs": lambda *args: get_logprobs(*args)})
    assert StepGraph(custom).phase_obstacle() == "custom functions"
    trainer.policy.double()
    assert graph.phase_obstacle() == "float64 weights"


def freeze_a_weight(trainer):
    trainer.policy.base_model.blocks[0].mlp.W_in.requires_grad_(False)


def replace_a_function(trainer):
    trainer.policy.base_model.blocks[0].mlp.act_fn = torch.tanh


def change_the_objective(trainer):
    trainer.objective.normalize = False


@pytest.mark.slow
@pytest.mark.parametrize("change", [freeze_a_weight, replace_a_function, change_the_objective])
def test_changed_step_is_captured_again(make_trainer, change):
    trainer = make_trainer()
    graph = trainer.step_graph = StepGraph(trainer, capture_on_tape)
    rollout = trainer.rollout_phase()
    trainer.learning_phase(rollout)
    assert graph.n_captures == 1
    change(trainer)
    minibatch, _ = ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator())
    inputs = trainer.policy, trainer.reference, minibatch, trainer.objective, 0.3
    weights = [p for p in trainer.policy.parameters() if p.requires_grad]
    found = graph.replayed(objective_terms)(*inputs).objective
    assert graph.reason is None and graph.n_captures == 2
    graph.backward(found)
    gradients = [p.grad.clone() for p in weights]
    trainer.optimizer.zero_grad()
    expected = objective_terms(*inputs).objective
    graph.backward(expected)  # as in a custom loop
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, [p.grad for p in weights])


@pytest.mark.slow
@pytest.mark.typed
def test_wrong_capture_warns_and_runs_eagerly(make_trainer):
    def capture(step):
        terms, gradients = step()
        return capture_on_tape(lambda: (terms, [2 * x for x in gradients]))

    trainer, expected = make_trainer(), make_trainer()
    trainer.step_graph = StepGraph(trainer, capture)
    with pytest.warns(UserWarning, match="cuda_graphs is switched off: .*differs from autograd's"):
        trainer.run_phase()
    expected.run_phase()
    assert is_equal(copy_weights(trainer.policy), copy_weights(expected.policy))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_graph_matches_autograd(make_trainer, precision):
    trainer = make_trainer(device="cuda", precision=precision)
    graph, models = trainer.step_graph, (trainer.policy, trainer.reference)
    for minibatch in ReplayMemory(trainer.rollout_phase(), 2, 1).get_minibatches(torch.Generator()):
        terms = objective_terms(*models, minibatch, trainer.objective, 0.3)
        expected = torch.autograd.grad(terms.objective, list(trainer.policy.parameters()))
        replayed = graph.replayed(objective_terms)(*models, minibatch, trainer.objective, 0.3)
        graph.backward(replayed.objective)
        assert graph.reason is None and graph.n_captures == 1
        for parameter, gradient in zip(trainer.policy.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-3)
