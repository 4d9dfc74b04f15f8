"""Who is called when, what they see, and that looking changes nothing."""

import warnings
from typing import get_args

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.training import Context, Event

pytestmark = pytest.mark.usefixtures("no_type_checks")

STEP = ["before_minibatch", "after_loss", "after_backward", "after_step"]


def record(trainer) -> list[tuple[str, int]]:
    """Notes every event with its phase."""
    seen = []
    for event in get_args(Event):
        trainer.on(event)(lambda ctx: seen.append((ctx.event, ctx.phase)))
    return seen


@pytest.mark.slow
def test_the_events_of_a_run_come_in_the_order_of_the_design(make_trainer):
    """Two minibatches, two passes: four steps per phase; saves only at the phases' edges here."""
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    seen = record(trainer)
    trainer.train()
    names = [event for event, _ in seen]
    without_saves = [name for name in names if name != "checkpoint"]
    assert without_saves == [
        "run_start",
        "after_rollout",
        "after_score",
        *STEP * 4,
        "after_phase",
        "run_end",
    ]
    assert names[names.index("after_phase") + 1 : -1] == ["checkpoint", "checkpoint"]
    assert names[0] == "run_start"


@pytest.mark.slow
def test_phases_are_counted_from_zero_and_the_end_comes_after_the_last(make_trainer):
    trainer = make_trainer(total_phases=3)
    seen = record(trainer)
    trainer.train()
    assert [phase for event, phase in seen if event == "after_phase"] == [0, 1, 2]
    assert [phase for event, phase in seen if event == "after_step"] == [
        phase for phase in range(3) for _ in range(4)
    ]
    assert seen[-1] == ("run_end", 3)


@pytest.mark.slow
def test_every_second_phase_is_called_in_phases_0_2_4(make_trainer):
    trainer = make_trainer(total_phases=5)
    called = {"after_phase": [], "after_step": [], "run_start": [], "run_end": []}
    for event, phases in called.items():
        trainer.on(event, every=2)(lambda ctx, phases=phases: phases.append(ctx.phase))
    trainer.train()
    assert called["after_phase"] == [0, 2, 4]
    assert called["after_step"] == [0] * 4 + [2] * 4 + [4] * 4
    assert (called["run_start"], called["run_end"]) == ([0], [5])


@pytest.mark.slow
def test_listeners_are_called_in_the_order_they_came_and_the_decorator_returns_them(make_trainer):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    calls = []

    @trainer.on("after_phase")
    def first(ctx):
        calls.append("first")

    trainer.on("after_phase")(lambda ctx: calls.append("second"))
    trainer.train()
    assert calls == ["first", "second"]
    assert callable(first) and first.__name__ == "first"


@pytest.mark.slow
def test_a_listener_that_raises_is_dropped_with_one_warning_and_the_run_goes_on(make_trainer):
    trainer = make_trainer(total_phases=3)
    calls = {"bad": 0, "good": 0}

    @trainer.on("after_step")
    def bad_probe(ctx):
        calls["bad"] += 1
        raise ZeroDivisionError("no such thing")

    @trainer.on("after_step")
    def good_probe(ctx):
        calls["good"] += 1

    with pytest.warns(UserWarning) as caught:
        reports = trainer.train()
    assert len(reports) == 3
    assert calls == {"bad": 1, "good": 12}
    (message,) = [str(w.message) for w in caught if "bad_probe" in str(w.message)]
    for part in ("ZeroDivisionError", "after_step", "phase 0", "no such thing"):
        assert part in message


def test_an_event_that_does_not_exist_is_refused_with_those_that_do(make_trainer, no_type_checks):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match="after_stepp.*Choose one of.*after_step,"):
        trainer.on("after_stepp")


def test_every_below_one_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="every=0"):
        make_trainer().on("after_step", every=0)


FIELDS = {
    "run_start": set(),
    "after_rollout": {"samples"},
    "after_score": {"samples", "rollout"},
    "before_minibatch": {"rollout", "minibatch", "step"},
    "after_loss": {"rollout", "minibatch", "step", "terms"},
    "after_backward": {"rollout", "minibatch", "step", "terms"},
    "after_step": {"rollout", "minibatch", "step", "terms", "grad_norm"},
    "after_phase": {"rollout", "report"},
    "checkpoint": {"checkpoint"},
    "run_end": {"reports"},
}
"""What is there at each event, beside what is always there."""


@pytest.mark.slow
def test_each_event_has_its_fields_and_says_where_the_others_are(make_trainer):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    there, missing = {}, []
    optional = set().union(*FIELDS.values())

    def look(ctx: Context) -> None:
        for name in ("args", "policy", "reference", "kl_coef", "run"):
            assert getattr(ctx, name) is not None
        there[ctx.event] = {name for name in optional if hasattr(ctx, name)}
        for name in optional - there[ctx.event]:
            with pytest.raises(AttributeError) as error:
                getattr(ctx, name)
            missing.append((ctx.event, name, str(error.value)))

    for event in FIELDS:
        trainer.on(event)(look)
    trainer.train()
    assert there == FIELDS
    assert len(missing) > 20
    for event, name, message in missing:
        assert message.startswith(f"ctx.{name} is not there at {event}; it is at ")


def test_reading_too_early_names_the_event_to_read_at():
    with pytest.raises(AttributeError, match="ctx.rollout is not there at after_rollout.*_score"):
        _ = Context("after_rollout", 0).rollout


def test_a_field_that_never_exists_is_refused_with_the_list_of_fields():
    with pytest.raises(AttributeError, match="no field 'rolout'.*phase.*rollout"):
        _ = Context("after_score", 0).rolout


def test_a_context_cannot_be_written():
    ctx = Context("after_phase", 3, report="a report")
    with pytest.raises(AttributeError, match="ctx.phase cannot be set.*read-only"):
        ctx.phase = 4
    assert (ctx.event, ctx.phase, ctx.report) == ("after_phase", 3, "a report")


@pytest.mark.slow
def test_grad_norm_is_the_norm_before_clipping(make_trainer):
    """At after_backward the gradient is as it came; after_step's norm must be the norm of that."""
    trainer = make_trainer(total_phases=1, warmup_steps=0, max_grad_norm=1e-3)
    by_hand, clipped, reported = [], [], []

    def norm() -> float:
        squares = sum(p.grad.double().square().sum().item() for p in trainer.policy.parameters())
        return squares**0.5

    trainer.on("after_backward")(lambda ctx: by_hand.append(norm()))
    trainer.on("after_step")(lambda ctx: (clipped.append(norm()), reported.append(ctx.grad_norm)))
    (report,) = trainer.train()
    assert reported == pytest.approx(by_hand, rel=1e-5)
    assert clipped == pytest.approx([1e-3] * 4, rel=1e-2)
    assert report.grad_norm == pytest.approx(sum(by_hand) / 4, rel=1e-5)


def nosy(ctx: Context) -> None:
    """Looks at everything and spills random numbers."""
    torch.rand(7)
    np.random.rand(7)
    torch.manual_seed(12)
    tokens = torch.randint(ctx.policy.base_model.cfg.d_vocab, (2, 5))
    with torch.no_grad():
        logits, cache = ctx.policy.base_model.run_with_cache(tokens)
        ctx.reference.run_with_cache(tokens)
        ctx.policy(tokens)
    _ = logits.std().item() + cache["resid_post", 0].mean().item()
    _ = sum(p.norm().item() for p in ctx.policy.parameters())
    if hasattr(ctx, "rollout"):
        _ = ctx.rollout.advantages.std().item() + ctx.rollout.raw_rewards.mean().item()
    if hasattr(ctx, "minibatch"):
        _ = ctx.policy(ctx.minibatch.tokens)[1].sum().item()
        _ = ctx.minibatch.ref_residuals.norm().item()


@pytest.mark.slow
def test_watching_a_run_at_every_event_leaves_its_weights_bit_for_bit_the_same(
    make_trainer, parameters_of, metrics_of
):
    alone, watched = make_trainer(total_phases=3, top_k=5), make_trainer(total_phases=3, top_k=5)
    calls = []
    for event in get_args(Event):
        watched.on(event)(nosy)
        watched.on(event)(lambda ctx: calls.append(ctx.event))
    alone.train()
    watched.train()
    assert set(calls) == set(get_args(Event))
    listening = [
        len(watched.callbacks.registered[event]) - len(alone.callbacks.registered.get(event, []))
        for event in get_args(Event)
    ]
    assert listening == [2] * 10
    weights, seen = parameters_of(alone.policy), parameters_of(watched.policy)
    assert all(torch.equal(weights[name], seen[name]) for name in weights)
    assert metrics_of(alone.run.path) == metrics_of(watched.run.path)


@pytest.mark.slow
def test_a_hook_that_a_listener_adds_stays_and_one_that_a_capture_adds_is_refused(make_trainer):
    """The first is a change that was asked for; the second would be one nobody asked for."""
    site = "blocks.0.hook_mlp_out"
    trainer, fired = make_trainer(), []

    @trainer.on("after_rollout")
    def adding(ctx):
        ctx.policy.base_model.add_hook(site, lambda activation, hook: fired.append(hook.name))

    @trainer.capture(site, at="after_score")
    def sneaking(ctx, acts):
        ctx.policy.base_model.add_hook(site, lambda activation, hook: activation * 0)

    with pytest.warns(UserWarning, match="sneaking.*hooks of .*hook_mlp_out were changed"):
        report = trainer.run_phase()
    assert fired and len(trainer.policy.base_model.hook_dict[site].fwd_hooks) == 1
    assert abs(report.ratio_first_minibatch - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"micro_batch_size": 2}], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("event", ["after_loss", "after_backward", "after_step", "after_score"])
def test_backward_in_a_listener_changes_nothing_of_the_training(
    make_trainer, parameters_of, event, fields
):
    """It goes through the run's own graph and through one of its own, and edits the gradients."""
    alone, watched = make_trainer(**fields), make_trainer(**fields)
    norms = []

    @watched.on(event)
    def meddle(ctx):
        if event == "after_loss" and ctx.terms.objective.requires_grad:
            ctx.terms.objective.backward()
        tokens = torch.arange(2, 8)[None]
        logits, values = ctx.policy(tokens)
        (logits.square().mean() + values.sum()).backward()
        norms.append(sum(p.grad.norm().item() for p in ctx.policy.parameters()))
        for parameter in ctx.policy.parameters():
            parameter.grad.mul_(100)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trainer in (alone, watched):
            trainer.train()
    assert norms and min(norms) > 0
    ours, theirs = parameters_of(watched.policy), parameters_of(alone.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
