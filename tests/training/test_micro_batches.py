"""Batches in parts: the gradient does not depend on the split, nor do the samples."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lab.training import Objective, Overrides, ReplayMemory, RLHFTrainer, objective_terms
from rlhf_lab.training.optimization import PolicyUpdate
from tests.training.recorded_runs import copy_weights, move_weights

SETTINGS = {
    "top_k": {"top_k": 5, "temperature": 1.3},
    "sequence_mean": {"loss_aggregation": "sequence_mean", "vf_clip": 0.01},
    "constant": {"loss_aggregation": "constant", "normalize_advantages": False},
    "gspo": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
    "k3": {"kl_estimator": "k3", "clip_coef_high": 0.3},
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def prepared(request, reel_args):
    """A trainer whose policy has moved since it sampled, and a minibatch of six sequences."""
    trainer = RLHFTrainer(reel_args(batch_size=6, num_minibatches=1, ent_coef=0.3, **request.param))
    rollout = trainer.rollout_phase()
    move_weights(trainer.policy)
    return trainer, next(ReplayMemory(rollout, 1, 1).get_minibatches(torch.Generator()))


def compute_in_parts(trainer, minibatch, part_size, **parts):
    """Return the terms of a minibatch in parts, whose gradients are added to the policy's."""
    args = dataclasses.replace(trainer.args)
    object.__setattr__(args, "micro_batch_size", part_size)  # need not divide the minibatch here
    names = ("policy", "reference", "objective", "world")
    parts = {name: getattr(trainer, name) for name in names} | parts
    update = PolicyUpdate(SimpleNamespace(args=args, **parts))
    return update.accumulate(objective_terms, minibatch, 0.3)


def gradients(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.policy.named_parameters()}


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=6, max_size=6).filter(any),
    part_size=st.integers(1, 6),
)
def test_split_changes_neither_value_nor_gradient(prepared, lengths, part_size):
    """Also if lengths differ, a response has no real token, or the last part is smaller."""
    trainer, minibatch = prepared
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    minibatch = dataclasses.replace(minibatch, mask=mask)
    trainer.policy.zero_grad()
    whole = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective, 0.3)
    whole.objective.backward()
    expected = gradients(trainer)
    trainer.policy.zero_grad()
    parts = compute_in_parts(trainer, minibatch, part_size)
    for field in dataclasses.fields(whole):
        found, wanted = getattr(parts, field.name), getattr(whole, field.name)
        found, wanted = (x[mask] if x.ndim else x for x in (found, wanted))
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4, msg=field.name)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in gradients(trainer).items():
        assert (gradient - expected[name]).abs().max() <= 2e-5 * max(largest, 1.0), name


def test_custom_functions_need_no_denominator(prepared):
    """A mean over the tokens of a part is weighted with the part's fraction."""
    trainer, minibatch = prepared
    defaults = {f.name: f.default for f in dataclasses.fields(Overrides)}
    names = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")
    custom = Overrides(**{n: lambda *args, f=defaults[n]: f(*args) for n in names})
    models = (trainer.policy, trainer.reference)
    whole = objective_terms(*models, minibatch, trainer.objective, 0.3)
    parts = compute_in_parts(trainer, minibatch, 4, objective=Objective(trainer.args, custom))
    assert parts.objective.item() == pytest.approx(whole.objective.item(), abs=1e-5)


@pytest.mark.slow
def test_phase_in_micro_batches_ends_like_one_in_minibatches(make_trainer):
    """Weights that moved by over 1e-3 differ by less than a tenth of that, from rounding."""
    fields = {"gen_len": 20, "temperature": 5.0, "warmup_steps": 0, "base_lr": 1e-3}
    fields |= {"top_p": 0.8, "generation_batch_size": 3}
    ends, seen = [copy_weights(make_trainer(**fields).policy)], []
    for size in (None, 1):
        trainer = make_trainer(micro_batch_size=size, **fields)
        if size == 1:
            for event in ("before_minibatch", "after_loss", "after_backward", "after_step"):
                trainer.on(event)(lambda ctx: seen.append((ctx.event, len(ctx.minibatch.tokens))))
            trainer.on("after_loss")(lambda ctx: seen.append(tuple(ctx.terms.logprobs.shape)))
        learned = trainer.learning_phase(trainer.rollout_phase())
        ends.append(copy_weights(trainer.policy))
        assert abs(learned.ratio_first_minibatch - 1) < 1e-4
    moved, apart = (
        max((a[name] - b[name]).abs().max() for name in a) for a, b in (ends[:2], ends[1:])
    )
    assert moved > 1e-3 and apart < 0.1 * moved
    step = [("before_minibatch", 4), ("after_loss", 4), (4, 20), ("after_backward", 4)]
    assert seen == [*step, ("after_step", 4)] * 4
