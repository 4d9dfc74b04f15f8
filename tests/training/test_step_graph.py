"""The captured learning step and the eager one agree, on the CPU by a replayed tape."""

import copy
import sys
from unittest.mock import Mock

import pytest
import torch

from rlhf_lab.functional import get_logprobs
from rlhf_lab.models.hooked_transformer import MLP
from rlhf_lab.training.optimization import PolicyUpdate
from rlhf_lab.training.ppo import objective_terms
from rlhf_lab.training.replay import ReplayMemory
from rlhf_lab.training.step_graph import StepGraph
from tests.tape import capture_on_tape
from tests.training.recorded_runs import copy_weights, is_equal

CASES = {
    "plain": {},
    "padded prompts": {"parts": {"prompts": ["this movie", "the film was", "this film"]}},
    "truncated, adaptive KL": {"top_k": 5, "kl_controller": "adaptive"},
    "sampled KL, early stop": {"kl_estimator": "k3", "target_kl": 1e-6},
    "skipped minibatches": {"ratio_threshold": 1.001, "weight_precision": "bf16"},
    "adapters, groups": {"lora_rank": 2, "advantages": "grpo", "samples_per_prompt": 4},
    "critic, bf16": {"value_head": "separate", "precision": "bf16"},
}
NIGHTLY = ("plain", "sampled KL, early stop", "adapters, groups")


@pytest.fixture
def train(make_trainer):
    """Trains eagerly or on tapes, and returns all weights and the graph."""

    def run(is_taped, prepare=lambda trainer: None, parts=None, phases=2, **fields):
        trainer = make_trainer(parts, **fields)
        trainer.step_graph = StepGraph(trainer, capture_on_tape) if is_taped else None
        prepare(trainer)
        for _ in range(phases):
            trainer.run_phase()
        weights = [p.detach().flatten() for p in trainer.policy.parameters()]
        return torch.cat(weights), trainer.step_graph

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(CASES[x], id=x, marks=pytest.mark.nightly if x in NIGHTLY else [])
        for x in CASES
    ],
)
def test_replayed_run_matches_eager_run(train, fields):
    (expected, _), (weights, graph) = (train(taped, **fields) for taped in (False, True))
    n_captures = graph.n_captures if "parts" in fields else 1
    assert graph.reason is None and graph.n_captures == n_captures >= 1
    torch.testing.assert_close(weights, expected, atol=1e-7, rtol=1e-6)


def add_reading_hook(trainer):
    trainer.policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: None)


def add_hook_in_phase_1(trainer):
    @trainer.on("before_minibatch")
    def add_hook(ctx):
        if ctx.phase == 1 and ctx.step == 2:
            double = lambda x, hook: 2 * x
            ctx.policy.base_model.add_hook("blocks.0.hook_mlp_out", double, is_permanent=True)


def read_gradients(trainer):
    trainer.gradients = []
    trainer.on("after_step")(
        lambda ctx: trainer.gradients.append(ctx.policy.value_head[0].weight.grad)
    )


def go_through_the_objective(trainer):
    @trainer.on("after_loss")
    def read(ctx):
        weight = ctx.policy.value_head[0].weight
        torch.autograd.grad(ctx.terms.value_loss, [weight], retain_graph=True)


def set_debugger(trainer):
    trainer.on("after_score")(lambda ctx: sys.settrace(lambda *frame: None))
    trainer.on("after_phase")(lambda ctx: sys.settrace(None))


def hook_parameter(trainer):
    trainer.policy.value_head[0].weight.register_hook(lambda gradient: 0.5 * gradient)


EAGER = {
    "cuda_graphs=False": {"cuda_graphs": False},
    "a split minibatch": {"micro_batch_size": 2},
    "optimizer_in_backward": {"optimizer_in_backward": True, "max_grad_norm": None},
    "activation_checkpointing": {"activation_checkpointing": True},
    "custom functions": {"parts": {"logprobs": lambda *args: get_logprobs(*args)}},
    "a debugger": {"prepare": set_debugger},
    "a callback of after_loss": {"prepare": go_through_the_objective},
    "hooks": {"prepare": add_reading_hook},
    "hooks on parameters": {"prepare": hook_parameter},
    "more than 10 tokens": {},
}
SETTINGS = ("a split minibatch", "optimizer_in_backward", "activation_checkpointing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "reason", [pytest.param(x, marks=pytest.mark.nightly if x in SETTINGS else []) for x in EAGER]
)
def test_step_runs_eagerly_if_it_must(train, reason, monkeypatch):
    if reason == "more than 10 tokens":
        monkeypatch.setattr("rlhf_lab.training.step_graph.MAX_TOKENS", 10)
    trace = sys.gettrace()
    _, graph = train(True, **EAGER[reason], phases=1)
    sys.settrace(trace)
    assert graph.reason == reason and graph.n_captures == 0


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [add_hook_in_phase_1, read_gradients])
def test_callbacks_between_steps_see_and_change_what_runs(train, prepare):
    (expected, _), (weights, graph) = (train(taped, prepare) for taped in (False, True))
    assert graph.n_captures == 1
    if prepare is read_gradients:  # of 8 steps: a callback may keep them
        assert len({gradient.sum().item() for gradient in graph.trainer.gradients}) > 4
    torch.testing.assert_close(weights, expected, atol=1e-7, rtol=1e-6)


CHANGES = {
    "attribute": lambda model, patch: setattr(model.blocks[0].mlp, "act_fn", torch.tanh),
    "forward": lambda model, patch: setattr(model.blocks[0].mlp, "forward", lambda x: 0 * x),
    "module": lambda model, patch: setattr(
        model.blocks[0], "mlp", copy.deepcopy(model.blocks[1].mlp)
    ),
    "method": lambda model, patch: patch.setattr(MLP, "forward", lambda self, x: 0 * x),
    "setting": lambda model, patch: setattr(model.cfg, "output_logits_soft_cap", 2.0),
    "objective": lambda model, patch: None,
    "frozen weight": lambda model, patch: model.blocks[0].mlp.W_in.requires_grad_(False),
}
REPLACED = ("forward", "module", "setting")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [pytest.param(x, marks=pytest.mark.nightly if x in REPLACED else []) for x in CHANGES]
)
def test_changed_module_is_captured_again(make_trainer, change, monkeypatch):
    trainer = make_trainer()
    graph = trainer.step_graph = StepGraph(trainer, capture_on_tape)
    rollout = trainer.rollout_phase()
    trainer.learning_phase(rollout)
    assert graph.n_captures == 1
    CHANGES[change](trainer.policy.base_model, monkeypatch)
    if change == "objective":
        trainer.objective.normalize = False
    minibatch, _ = ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator())
    models = trainer.policy, trainer.reference
    expected = objective_terms(*models, minibatch, trainer.objective, 0.3).objective
    compute = graph.replayed(objective_terms)
    found = compute(*models, minibatch, trainer.objective, 0.3).objective
    assert graph.reason is None and graph.n_captures == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.typed
@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (lambda step: capture_on_tape(lambda: doubled(step())), "differs from autograd's"),
        (Mock(side_effect=RuntimeError("no memory")), "the capture failed .no memory"),
    ],
)
def test_wrong_or_failed_capture_warns_and_runs_eagerly(make_trainer, capture, message):
    trainer, expected = make_trainer(), make_trainer()
    trainer.step_graph = StepGraph(trainer, capture)
    with pytest.warns(UserWarning, match=f"cuda_graphs is switched off: .*{message}"):
        trainer.learning_phase(trainer.rollout_phase())
    trainer.learning_phase(trainer.rollout_phase())
    for _ in range(2):
        expected.learning_phase(expected.rollout_phase())
    assert is_equal(copy_weights(trainer.policy), copy_weights(expected.policy))


def doubled(outputs):
    terms, gradients = outputs
    return terms, [2 * x for x in gradients]


@pytest.mark.slow
def test_custom_loop_after_a_replayed_phase_uses_autograd(make_trainer):
    trainer = make_trainer()
    trainer.step_graph = StepGraph(trainer, capture_on_tape)
    rollout = trainer.rollout_phase()
    trainer.learning_phase(rollout)
    (minibatch,) = ReplayMemory(rollout, 1, 1).get_minibatches(torch.Generator())
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    weights = list(trainer.policy.parameters())
    expected = torch.autograd.grad(terms.objective, weights, retain_graph=True)
    trainer.optimizer.zero_grad()
    PolicyUpdate(trainer).backward(terms.objective)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


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
