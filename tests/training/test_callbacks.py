"""Callbacks: when they are called, with which fields, and that they do not change the run."""

import warnings

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.training import Context
from tests.training.recorded_runs import copy_weights, is_equal

pytestmark = pytest.mark.usefixtures("no_type_checks")

STEP = ["before_minibatch", "after_loss", "after_backward", "after_step"]


def test_events_come_in_order(runs):
    """Two minibatches and two passes are four steps per phase."""
    events = runs("plain").events
    found = [event for event in events if event[0] != "checkpoint"]
    expected = [("run_start", 0)]
    for phase in range(5):
        names = ["after_rollout", "after_score", *STEP * 4, "after_phase"]
        expected += [(name, phase) for name in names]
    assert found == [*expected, ("run_end", 5)]
    checkpoints = [phase for name, phase in events if name == "checkpoint"]
    assert set(checkpoints) == set(range(6)) and checkpoints == sorted(checkpoints)


@pytest.mark.slow
def test_callbacks_are_called_every_so_many_phases_in_order(make_trainer):
    trainer = make_trainer(total_phases=5, num_minibatches=1, batches_per_learning_phase=1)
    events = ("after_phase", "after_step", "run_start", "run_end")
    called, calls = {name: [] for name in events}, []
    for event, phases in called.items():
        trainer.on(event, every=2)(lambda ctx, phases=phases: phases.append(ctx.phase))

    @trainer.on("after_phase", every=4)
    def first(ctx):
        calls.append("first")

    trainer.on("after_phase", every=4)(lambda ctx: calls.append("second"))
    trainer.train()
    assert called["after_phase"] == called["after_step"] == [0, 2, 4]
    assert (called["run_start"], called["run_end"]) == ([0], [5])
    assert calls == ["first", "second"] * 2 and first.__name__ == "first"


@pytest.mark.slow
def test_callback_that_raises_is_removed_with_one_warning(make_trainer):
    """Also one whose dict cannot be stored. Other callbacks continue."""
    trainer, calls = make_trainer(), {"bad": 0, "odd": 0, "good": 0}

    def count(name, result):
        calls[name] += 1
        return result

    @trainer.on("after_step")
    def bad_probe(ctx):
        return count("bad", 1) / 0

    @trainer.on("after_phase")
    def odd_probe(ctx):
        return count("odd", {"phase": 3})

    trainer.on("after_step")(lambda ctx: count("good", None))
    with pytest.warns(UserWarning) as caught:
        assert len(trainer.train()) == 2
    assert calls == {"bad": 1, "odd": 1, "good": 8}
    bad, odd = [str(w.message) for w in caught if "_probe" in str(w.message)]
    assert "bad_probe raised ZeroDivisionError at after_step of phase 0" in bad
    assert "odd_probe raised ConfigError at after_phase" in odd and "a key 'phase'" in odd


def test_on_rejects_unknown_events_and_intervals(make_trainer):
    with pytest.raises(ConfigError, match="after_stepp.*Choose one of.*after_step,"):
        make_trainer().on("after_stepp")(print)
    with pytest.raises(ConfigError, match="every=0"):
        make_trainer().on("after_step", 0)(print)


IN_STEP = {"rollout", "minibatch", "step"}
FIELDS = {
    "run_start": set(),
    "after_rollout": {"samples"},
    "after_score": {"samples", "rollout"},
    "before_minibatch": IN_STEP,
    "after_loss": IN_STEP | {"terms"},
    "after_backward": IN_STEP | {"terms"},
    "after_step": IN_STEP | {"terms", "grad_norm"},
    "after_phase": {"rollout", "report"},
    "checkpoint": {"checkpoint"},
    "run_end": {"reports"},
}


def test_each_event_has_its_fields(runs):
    assert runs("plain").fields == FIELDS


def test_context_names_the_event_of_a_missing_field():
    ctx = Context("after_rollout", 3, samples="some")
    assert (ctx.event, ctx.phase, ctx.samples) == ("after_rollout", 3, "some")
    with pytest.raises(AttributeError, match="ctx.rollout is not there at after_rollout.*_score"):
        _ = ctx.rollout
    with pytest.raises(AttributeError, match="no field 'rolout'.*phase.*rollout"):
        _ = ctx.rolout
    with pytest.raises(AttributeError, match="ctx.phase cannot be set.*read-only"):
        ctx.phase = 4


def test_grad_norm_is_the_norm_before_clipping(runs):
    """The limit is 1; after clipping, the norm over all weights is at most that."""
    run = runs("critic")
    assert max(step.norm_before for step in run.steps) > 1.5 * run.trainer.args.max_grad_norm
    for step in run.steps:
        assert step.grad_norm == pytest.approx(step.norm_before, rel=1e-5)
        assert step.norm_after == pytest.approx(min(1.0, step.norm_before), rel=1e-4)
    for report in run.reports:
        norms = [step.norm_before for step in run.steps if step.phase == report.phase]
        assert report.grad_norm == pytest.approx(sum(norms) / len(norms), rel=1e-5)


@pytest.mark.slow
def test_hook_of_a_callback_stays_but_not_that_of_a_capture(make_trainer):
    site = "blocks.0.hook_mlp_out"
    trainer, fired = make_trainer(), []

    @trainer.on("after_rollout")
    def adding(ctx):
        ctx.policy.base_model.add_hook(site, lambda activation, hook: fired.append(hook.name))

    @trainer.capture(site, at="after_score")
    def changing(ctx, acts):
        ctx.policy.base_model.add_hook(site, lambda activation, hook: activation * 0)

    with pytest.warns(UserWarning, match="changing.*hooks of .*hook_mlp_out were changed"):
        report = trainer.run_phase()
    assert fired and len(trainer.policy.base_model.hook_dict[site].fwd_hooks) == 1
    assert abs(report.ratio_first_minibatch - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("after_score", {}),
        ("after_loss", {}),
        ("after_backward", {"micro_batch_size": 2}),
    ],
)
def test_backward_in_a_callback_leaves_the_run_unchanged(make_trainer, event, fields):
    """Through the run's graph and a separate one; the gradients are edited as well."""
    alone, watched = make_trainer(**fields), make_trainer(**fields)
    norms = []

    @watched.on(event)
    def meddle(ctx):
        if event == "after_loss" and ctx.terms.objective.requires_grad:
            ctx.terms.objective.backward()
        logits, values = ctx.policy(torch.arange(2, 8)[None])
        (logits.square().mean() + values.sum()).backward()
        norms.append(sum(p.grad.norm().item() for p in ctx.policy.parameters()))
        for parameter in ctx.policy.parameters():
            parameter.grad.mul_(100)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trainer in (alone, watched):
            trainer.run_phase()
    assert norms and min(norms) > 0
    assert is_equal(copy_weights(watched.policy), copy_weights(alone.policy))
