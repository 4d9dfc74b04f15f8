"""Less memory for a phase: micro-batches, steps in the backward pass, activation checkpointing."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.forward import recomputing_blocks
from rlhf_lab.training import ReplayMemory, RLHFTrainer, objective_terms
from rlhf_lab.training.optimization import PolicyUpdate
from tests.training.recorded_runs import IN_BACKWARD, copy_weights, is_equal, move_weights

pytestmark = pytest.mark.slow

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
    args = dataclasses.replace(trainer.args, micro_batch_size=part_size)
    names = ("policy", "reference", "objective", "world")
    parts = {name: getattr(trainer, name) for name in names} | parts
    update = PolicyUpdate(SimpleNamespace(args=args, **parts))
    return update.accumulate(objective_terms, minibatch, 0.3)


def gradients(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.policy.named_parameters()}


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=6, max_size=6).filter(any),
    part_size=st.integers(1, 6),
)
def test_split_changes_neither_value_nor_gradient(prepared, lengths, part_size):
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


ON = {"activation_checkpointing": True}


def compute_gradients(make_trainer, parts: dict | None, **fields) -> tuple[list[Tensor], int]:
    """Return the gradients of the first minibatch's objective, and the bytes its graph kept."""
    trainer, sizes = make_trainer(parts, gen_len=26, **fields), []
    rollout = trainer.rollout_phase()
    minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator()))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.nbytes) or x, lambda x: x
    ):
        terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    terms.objective.backward()
    return [p.grad for p in trainer.policy.parameters() if p.grad is not None], sum(sizes)


PATHS = {
    "plain": (None, {}),
    "custom log-probs": ({"logprobs": lambda *args: F.get_logprobs(*args)}, {"lora_rank": 2}),
    "critic in bf16": (None, {"value_head": "separate", "precision": "bf16"}),
}


@pytest.mark.parametrize(("parts", "fields"), PATHS.values(), ids=PATHS.keys())
def test_gradient_is_bitwise_equal_and_less_is_kept(make_trainer, parts, fields):
    plain, kept = compute_gradients(make_trainer, parts, **fields)
    again, kept_again = compute_gradients(make_trainer, parts, **ON, **fields)
    assert len(plain) == len(again) > 0 and all(map(torch.equal, plain, again))
    assert kept_again < 0.6 * kept


def test_hooks_in_a_block_raise(make_trainer):
    """Before a run is written, at the start of learning, and between forward and backward.

    Hooks outside the blocks fire once.
    """
    trainer, seen = make_trainer(**ON), []
    model, rollout = trainer.policy.base_model, trainer.rollout_phase()
    model.add_hook("ln_final.hook_normalized", lambda x, hook: seen.append(x.requires_grad))
    trainer.learning_phase(rollout)
    assert seen == [True] * 4
    model.add_hook("blocks.1.hook_resid_post", lambda x, hook: x)
    for run in (trainer.run_phase, lambda: trainer.learning_phase(rollout)):
        with pytest.raises(ConfigError, match="activation_checkpointing=True.*blocks.1.*second"):
            run()
    assert trainer.run is None
    model.reset_hooks()
    with recomputing_blocks(model):
        assert "forward" in vars(model.blocks[0])
        logits = model(torch.tensor([[4, 5, 6]]))
    assert "forward" not in vars(model.blocks[0])
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: 2 * x)
    with pytest.raises(ConfigError, match="fire a second time"):
        logits.sum().backward()
