"""Callbacks: calls, fields, returned dicts, and that they do not change the run."""

import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_lab.errors import RunError
from rlhf_lab.probes import Run
from rlhf_lab.training import Context, RLHFTrainer
from rlhf_lab.training.callbacks import Callbacks
from tests.training.recorded_runs import copy_weights, is_equal, train_partly

pytestmark = pytest.mark.usefixtures("no_type_checks")

STEP = ["before_minibatch", "after_loss", "after_backward", "after_step"]
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


def test_events_come_in_order_with_their_fields(runs):
    events = runs("plain").events
    found = [event for event in events if event[0] != "checkpoint"]
    expected = [("run_start", 0)]
    for phase in range(5):
        names = ["after_rollout", "after_score", *STEP * 4, "after_phase"]
        expected += [(name, phase) for name in names]
    assert found == [*expected, ("run_end", 5)]
    checkpoints = [phase for name, phase in events if name == "checkpoint"]
    assert set(checkpoints) == set(range(6)) and checkpoints == sorted(checkpoints)
    assert runs("plain").fields == FIELDS


def test_callback_that_raises_is_removed_with_one_warning():
    """Also one whose dict cannot be stored. Other callbacks continue."""
    callbacks, calls = Callbacks(), []

    @callbacks.on("after_step")
    def bad_probe(ctx):
        calls.append("bad")
        return 1 / 0

    @callbacks.on("after_step")
    def odd_probe(ctx):
        calls.append("odd")
        return {"phase": 3}

    callbacks.on("after_step")(lambda ctx: calls.append("good"))
    with pytest.warns(UserWarning) as caught:
        for phase in range(3):
            callbacks.emit("after_step", phase, run=SimpleNamespace())
    assert calls == ["bad", "odd", "good", "good", "good"]
    bad, odd = [str(warning.message) for warning in caught]
    assert "bad_probe raised ZeroDivisionError at after_step of phase 0" in bad
    assert "odd_probe raised ConfigError at after_step" in odd and "a key 'phase'" in odd
    assert callbacks.dropped == {"bad_probe": (0, bad), "odd_probe": (0, odd)}


def test_context_names_the_event_of_a_missing_field():
    ctx = Context("after_rollout", 3, samples="some")
    assert (ctx.event, ctx.phase, ctx.samples) == ("after_rollout", 3, "some")
    with pytest.raises(AttributeError, match="ctx.rollout is not there at after_rollout.*_score"):
        _ = ctx.rollout
    with pytest.raises(AttributeError, match="ctx.rolout is not there at after_rollout.*no event"):
        _ = ctx.rolout
    with pytest.raises(AttributeError, match="ctx.phase cannot be set.*read-only"):
        ctx.phase = 4


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
@pytest.mark.parametrize("fields", [{}, {"micro_batch_size": 2}])
def test_backward_in_a_callback_leaves_the_run_unchanged(make_trainer, fields):
    """Through the run's graph and a separate one; the gradients are edited as well."""
    alone, watched = make_trainer(**fields), make_trainer(**fields)
    norms = []

    @watched.on("after_score")
    @watched.on("after_loss")
    @watched.on("after_backward")
    def meddle(ctx):
        if ctx.event == "after_loss" and ctx.terms.objective.requires_grad:
            ctx.terms.objective.backward(retain_graph=True)
        logits, values = ctx.policy(torch.arange(2, 8)[None])
        (logits.square().mean() + values.sum()).backward()
        norms.append(sum(p.grad.norm().item() for p in ctx.policy.parameters()))
        for parameter in ctx.policy.parameters():
            parameter.grad.mul_(100)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trainer in (alone, watched):
            trainer.run_phase()
    assert len(norms) == 1 + 2 * 4 and min(norms) > 0
    assert is_equal(copy_weights(watched.policy), copy_weights(alone.policy))


def reward_and_kl(ctx):
    return {"reward": ctx.rollout.raw_rewards.mean(), "kl": ctx.rollout.kl[0, :2]}


@pytest.mark.slow
def test_returned_dicts_are_stored_and_read_back(make_trainer):
    trainer, seen = make_trainer(total_phases=3), []
    values = [torch.tensor([[0.5, 1.0]], dtype=torch.bfloat16), torch.ones((), requires_grad=True)]
    values = [values[0], 2 * values[1], np.array([1, 2]), np.float32(0.5), torch.tensor([True])]
    values += [[torch.tensor(2), None], {"a": (1, "b")}]
    trainer.on("after_score", every=2)(partial(reward_and_kl))
    trainer.on("after_score", every=2)(lambda ctx: seen.append(ctx.rollout))
    for value in values:
        trainer.on("run_start")(lambda ctx, value=value: {"value": value})
    for value in (None, 3, [1], "words"):
        trainer.on("after_phase")(lambda ctx, value=value: value)

    @trainer.capture("blocks.1.hook_resid_post", pos=-1, tokens=torch.tensor([[1, 2, 3]]))
    def norm(ctx, acts):
        return {"norm": acts[0].norm()}

    trainer.rollout_phase()  # without a run, nothing is stored
    seen.clear()
    trainer.train()
    run = Run(trainer.run.path)
    names = [f"lambda_{n}" for n in range(2, 9)]
    assert sorted(run.functions()) == [*names, "norm", "reward_and_kl"]
    found = [run.returned(name)[0]["value"] for name in names]
    assert found == [[[0.5, 1.0]], 2.0, [1, 2], 0.5, [True], [2, None], {"a": [1, "b"]}]
    assert run.returned("reward_and_kl") == [
        {"phase": phase, "event": "after_score"}
        | {"reward": rollout.raw_rewards.mean().item(), "kl": rollout.kl[0, :2].tolist()}
        for phase, rollout in zip((0, 2), seen, strict=True)
    ]
    _, cache = trainer.policy.base_model.run_with_cache(torch.tensor([[1, 2, 3]]))
    expected = cache["resid_post", 1][0, -1].norm().item()
    assert run.returned("norm")[-1]["norm"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RunError, match="no dicts of a function 'kl'. Available: .*reward_and_kl"):
        run.returned("kl")


def register(trainer):
    """Register a function at every event that a resumed run repeats exactly."""

    @trainer.on("after_rollout")
    @trainer.on("after_step")
    @trainer.on("after_phase")
    @trainer.on("checkpoint")
    @trainer.on("run_end")
    def watched(ctx):
        weights = sum(p.double().sum().item() for p in ctx.policy.parameters())
        return {"weights": weights, "coef": ctx.kl_coef}

    return trainer


@pytest.mark.slow
def test_resumed_run_stores_each_record_once(make_trainer):
    """Saved after 2 phases and interrupted after 3, so the records of phase 2 come twice."""
    whole, broken = (register(make_trainer(total_phases=4, save_every=2)) for _ in range(2))
    whole.train()
    again = register(RLHFTrainer.resume(train_partly(broken, 3)))
    assert again.phase == 2
    again.train()
    expected, found = (Run(t.run.path).returned("watched") for t in (whole, again))
    assert found == expected
    where = [(r["event"], r["phase"], r.get("step"), r.get("checkpoint")) for r in expected]
    assert [x[1] for x in where if x[3] == "last"] == [0, 2, 4]
    assert [x for x in where if x[0] == "after_step"] == [
        ("after_step", phase, step, None) for phase in range(4) for step in range(4)
    ]
    events = ("after_rollout", "after_phase", "run_end")
    assert [x[0] for x in where if x[0] in events] == [*events[:2] * 4, events[2]]
