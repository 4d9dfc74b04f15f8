"""Callbacks: calls, fields, returned dicts, and that they do not change the run."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_lab.errors import RunError
from rlhf_lab.probes import Run
from rlhf_lab.training import Context
from rlhf_lab.training.callbacks import Callbacks
from tests.training.recorded_runs import RECORDED, record_sums

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
    records = Run(runs("plain").path).returned("record_sums")
    stored = [(record["event"], record["phase"]) for record in records]
    assert stored == [event for event in events if event[0] in RECORDED]
    steps = [record["step"] for record in records if record["event"] == "after_step"]
    assert steps == [0, 1, 2, 3] * 5


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
    assert "division by zero (test_callbacks.py, line " in bad
    assert "odd_probe raised ConfigError at after_step" in odd and "a key 'phase'" in odd
    assert callbacks.dropped == {"bad_probe": (0, bad), "odd_probe": (0, odd)}


def test_callback_registered_twice_warns_but_not_those_of_a_loop(recwarn):
    callbacks, scope = Callbacks(), {}
    on = callbacks.on
    for name in "abb__B":  # a file system may ignore case
        exec(f"def {name}(ctx): ...", scope)
        on("after_step")(scope[name])
        on("after_phase")(partial(scope[name]))
    exec("for _ in range(2):\n    @on('after_loss')\n    def f(ctx): ...", {"on": on})
    for callback in (*(lambda ctx: None for _ in "12"), [].append, [].append):
        on("after_loss")(callback)
    on("checkpoint", last=True)(partial(print))
    on("checkpoint")(partial(len))
    assert [x.name for x in callbacks.registered["checkpoint"]] == ["len", "print"]
    (warning,) = recwarn
    assert str(warning.message).startswith("b is registered twice at after_step.")
    assert [x.name for x in callbacks.registered["after_step"]] == "a b b_3 _ __3 B_5".split()


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
def test_returned_dicts_are_stored_and_others_warn(make_trainer, recwarn):
    trainer = make_trainer(total_phases=4)
    values = {
        "half": (torch.tensor([[0.5, 1.0]], dtype=torch.bfloat16), [[0.5, 1.0]]),
        "gradient": (2 * torch.ones((), requires_grad=True), 2.0),
        "numpy": ([np.array([1, 2]), np.float32(0.5)], [[1, 2], 0.5]),
        "containers": ({"a": (1, torch.tensor([True])), "b": None}, {"a": [1, [True]], "b": None}),
    }
    record = partial(record_sums)
    trainer.on("after_score", every=2)(record)
    trainer.on("run_end", every=3)(record)  # `every` does not apply
    trainer.on("run_start")(lambda ctx: {name: value for name, (value, _) in values.items()})
    for value in (None, 3, [1]):
        trainer.on("after_phase")(lambda ctx, value=value: value)
    trainer.rollout_phase()  # on its own, as that after the run: nothing is stored
    trainer.train()
    trainer.rollout_phase()
    lost = {str(x.message) for x in recwarn if "is not stored. Return a dict" in str(x.message)}
    assert {message.split()[3] for message in lost} == {"int,", "list,"}
    run = Run(trainer.run.path)
    assert sorted(run.functions()) == ["lambda", "record_sums"]
    (found,) = run.returned("lambda")
    assert {name: found[name] for name in values} == {name: x for name, (_, x) in values.items()}
    assert [record["phase"] for record in run.returned("record_sums")] == [0, 2, 4]
    with pytest.raises(RunError, match="no dicts of a function 'kl'. Available: .*record_sums"):
        run.returned("kl")
    with pytest.raises(RunError, match=r"Use returned\('record_sums'\) for the dicts"):
        run.records("record_sums")
