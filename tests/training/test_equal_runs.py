"""Variants of a run that train to the same weights, bitwise, and to the same numbers."""

import warnings
from collections.abc import Callable
from functools import cache

import pytest
import torch

from rlhf_lab.training import RLHFTrainer
from tests.training.recorded_runs import (
    IN_BACKWARD,
    copy_weights,
    is_equal,
    read_files,
    read_metrics,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]

Make = Callable[..., RLHFTrainer]
LIMITS = {"ratio_threshold": 1e6, "target_kl": 1e6}
SHORT = {"total_phases": 2}
PARTS = SHORT | {"micro_batch_size": 2}
UNCLIPPED = SHORT | {"max_grad_norm": None}
ADAPTERS = UNCLIPPED | {"lora_rank": 2}
CRITIC = {"value_head": "separate", "precision": "bf16"}
RECOMPUTED = {"activation_checkpointing": True}


def train(trainer: RLHFTrainer) -> RLHFTrainer:
    trainer.train()
    return trainer


def stop_and_continue(make: Make) -> RLHFTrainer:
    trainer = make()
    trainer.on("after_step")(lambda ctx: trainer.request_stop() if ctx.phase == 1 else None)
    assert [report.phase for report in trainer.train()] == [0, 1]
    info = trainer.run.read_info()
    assert (info["status"], info["phases_done"], "final" in info) == ("stopped", 2, False)
    assert [report.phase for report in trainer.train()] == [2, 3, 4]
    return trainer


def evaluate_between_phases(make: Make) -> RLHFTrainer:
    trainer, seen = make(), []
    for report in trainer:
        if report.phase == 1:
            break
    trainer.recorder.writer.wait()
    files = read_files(trainer.run.path)
    weights = copy_weights(trainer.policy)
    trainer.on("after_rollout")(lambda ctx: seen.append(ctx.phase))
    assert trainer.evaluate() == trainer.evaluate() and seen == []
    assert is_equal(copy_weights(trainer.policy), weights) and trainer.phase == 2
    assert read_files(trainer.run.path) == files
    return train(trainer)


def go_backward_in_callbacks(make: Make) -> RLHFTrainer:
    """Through the run's graph and a separate one; the gradients are edited as well."""
    trainer = make()

    @trainer.on("after_score")
    @trainer.on("after_loss")
    @trainer.on("after_backward")
    def meddle(ctx):
        if ctx.event == "after_loss" and ctx.terms.objective.requires_grad:
            ctx.terms.objective.backward(retain_graph=True)
        logits, values = ctx.policy(torch.arange(2, 8)[None])
        (logits.square().mean() + values.sum()).backward()
        for parameter in ctx.policy.parameters():
            parameter.grad.mul_(100)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train()
    return trainer


def train_under_another_global_seed(make: Make) -> RLHFTrainer:
    """test_fields.py has a run with another `seed`."""
    torch.manual_seed(9)
    state = torch.get_rng_state()
    trainer = train(make())
    assert torch.equal(torch.get_rng_state(), state)
    return trainer


def log_to_tensorboard(make: Make) -> RLHFTrainer:
    pytest.importorskip("tensorboard")
    return train(make(loggers="tensorboard"))


# name: settings of both runs, next to those of "plain"; how to train the variant
VARIANTS: dict[str, tuple[dict, Callable[[Make], RLHFTrainer]]] = {
    "stopped and continued": ({}, stop_and_continue),
    "evaluated between phases": ({}, evaluate_between_phases),
    "another global seed": ({}, train_under_another_global_seed),
    "backward in callbacks": ({}, go_backward_in_callbacks),
    "backward in callbacks, micro-batches": (PARTS, go_backward_in_callbacks),
    "limits that are never reached": ({}, lambda make: train(make(**LIMITS))),
    "activation checkpointing": ({}, lambda make: train(make(**RECOMPUTED))),
    "loggers": ({}, log_to_tensorboard),
    # a step of AdamW depends on one weight's gradient and moments only
    "in backward": (UNCLIPPED | CRITIC, lambda make: train(make(**IN_BACKWARD, **RECOMPUTED))),
    "in backward, adapters": (ADAPTERS, lambda make: train(make(**IN_BACKWARD, **RECOMPUTED))),
}


@pytest.fixture(scope="module")
def base(make_configured, runs):
    """The run of settings, without callbacks except for those of "plain"."""
    make = cache(lambda settings: train(make_configured("plain", **dict(settings))))
    return lambda settings: make(tuple(settings.items())) if settings else runs("plain").trainer


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_plain_run(make_configured, base, name):
    settings, train_variant = VARIANTS[name]

    def make(**changes):
        return make_configured("plain", **settings | changes)

    expected, found = base(settings), train_variant(make)
    assert is_equal(copy_weights(found.policy), copy_weights(expected.policy))
    lines = [read_metrics(trainer.run.path) for trainer in (found, expected)]
    for line, plain in zip(*lines, strict=True):  # the norm is summed in another order
        assert line == plain | {"grad_norm": pytest.approx(plain["grad_norm"], rel=1e-5)}
    assert found.run.read_info()["final"] == expected.run.read_info()["final"]
    texts = [(trainer.run.path / "samples.jsonl").read_bytes() for trainer in (found, expected)]
    assert texts[0] == texts[1]
