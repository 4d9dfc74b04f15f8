"""Minibatches and batches in parts: the same gradient however cut, the same samples joined."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import load_model
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.sampling import SamplingSpec, join_samples, sample, sample_in_parts
from rlhf_lab.training import (
    Objective,
    Overrides,
    ReplayMemory,
    RLHFTrainer,
    objective_terms,
)
from rlhf_lab.training.optimization import PolicyUpdate

SETTINGS = {
    "plain": {},
    "top_k": {"top_k": 5, "temperature": 1.3},
    "sequence_mean": {"loss_aggregation": "sequence_mean", "vf_clip": 0.01},
    "constant": {"loss_aggregation": "constant", "normalize_advantages": False},
    "gspo": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
    "k3": {"kl_estimator": "k3", "clip_coef_high": 0.3},
    "kl_in_reward": {"kl_in": "reward"},
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def prepared(request, reel_args):
    """A trainer whose policy has moved since it sampled, and a minibatch of six sequences."""
    args = reel_args(batch_size=6, num_minibatches=1, ent_coef=0.3, **request.param)
    trainer = RLHFTrainer(args)
    rollout = trainer.rollout_phase()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return trainer, next(ReplayMemory(rollout, 1, 1).get_minibatches(torch.Generator()))


def in_parts(trainer, minibatch, objective, kl_coef, part_size):
    """The terms of a minibatch that is cut, whose gradients are added to the policy's."""
    args = dataclasses.replace(objective.args, micro_batch_size=None)
    object.__setattr__(args, "micro_batch_size", part_size)  # need not divide the minibatch here
    update = PolicyUpdate(
        SimpleNamespace(
            args=args,
            objective=objective,
            policy=trainer.policy,
            reference=trainer.reference,
            world=None,
        )
    )
    return update.accumulate(objective_terms, minibatch, kl_coef)


def gradients(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.policy.named_parameters()}


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=6, max_size=6).filter(any),
    part_size=st.integers(1, 6),
)
def test_value_and_gradient_are_the_same_however_the_minibatch_is_cut(prepared, lengths, part_size):
    """Also where lengths differ, a response has no real token, or the last part is smaller."""
    trainer, minibatch = prepared
    minibatch = dataclasses.replace(
        minibatch, mask=torch.arange(6) < torch.tensor(lengths)[:, None]
    )
    trainer.policy.zero_grad()
    whole = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective, 0.3)
    whole.objective.backward()
    expected = gradients(trainer)
    trainer.policy.zero_grad()
    cut = in_parts(trainer, minibatch, trainer.objective, 0.3, part_size)
    for field in dataclasses.fields(whole):
        found, wanted = getattr(cut, field.name), getattr(whole, field.name)
        found, wanted = (x[minibatch.mask] if x.ndim else x for x in (found, wanted))
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4, msg=field.name)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in gradients(trainer).items():
        assert (gradient - expected[name]).abs().max() <= 2e-5 * max(largest, 1.0), name


@pytest.mark.slow
def test_means_of_parts_alone_would_be_another_gradient(prepared):
    """Otherwise the comparison above would hold for nothing."""
    trainer, minibatch = prepared
    lengths = torch.tensor([1, 6, 6, 6, 6, 6])
    minibatch = dataclasses.replace(minibatch, mask=torch.arange(6) < lengths[:, None])
    rest = (trainer.objective, 0.3)
    whole = objective_terms(trainer.policy, trainer.reference, minibatch, *rest).value_loss
    alone = [
        objective_terms(trainer.policy, trainer.reference, minibatch[torch.tensor([i])], *rest)
        for i in range(6)
    ]
    mean = sum(terms.value_loss.item() for terms in alone) / 6
    assert abs(mean - whole.item()) > 1e-3 * whole.item()


def test_the_callers_own_functions_need_not_know_of_parts(reel_args):
    """A mean over the tokens of a part, weighed with its share, needs no denominator."""
    args = reel_args(batch_size=6, num_minibatches=1)
    trainer = RLHFTrainer(args)
    rollout = trainer.rollout_phase()
    minibatch = next(ReplayMemory(rollout, 1, 1).get_minibatches(torch.Generator()))
    custom = Overrides(
        clipped_surrogate=lambda *given: F.calc_clipped_surrogate_objective(*given),
        value_loss=lambda *given: F.calc_value_function_loss(*given),
        entropy_bonus=lambda *given: F.calc_entropy_bonus(*given),
        kl_penalty=lambda *given: F.calc_kl_penalty(*given),
    )
    models = (trainer.policy, trainer.reference)
    whole = objective_terms(*models, minibatch, Objective(args), 0.3)
    cut = in_parts(trainer, minibatch, Objective(args, custom), 0.3, 4)
    assert cut.objective.item() == pytest.approx(whole.objective.item(), abs=1e-5)


@pytest.mark.slow
def test_a_run_in_micro_batches_ends_like_one_in_minibatches(make_trainer, parameters_of):
    """Within what the order of additions leaves: 1e-4 on weights that moved by more than 1e-3."""
    fields = {"gen_len": 20, "temperature": 5.0, "total_phases": 1, "warmup_steps": 0}
    start = parameters_of(make_trainer(**fields).policy)
    ends = []
    for size in (None, 1):
        trainer = make_trainer(micro_batch_size=size, base_lr=1e-3, **fields)
        report = trainer.run_phase()
        ends.append(parameters_of(trainer.policy))
        assert abs(report.ratio_first_minibatch - 1) < 1e-4
    moved = max((ends[0][name] - start[name]).abs().max() for name in start)
    apart = max((ends[0][name] - ends[1][name]).abs().max() for name in start)
    assert moved > 1e-3 and apart < 0.1 * moved


@pytest.mark.slow
def test_every_event_of_a_step_comes_once_with_the_whole_minibatch(make_trainer):
    trainer, seen = make_trainer(micro_batch_size=1), []
    for event in ("before_minibatch", "after_loss", "after_backward", "after_step"):
        trainer.on(event)(lambda ctx: seen.append((ctx.event, len(ctx.minibatch.tokens))))
    trainer.on("after_loss")(lambda ctx: seen.append(ctx.terms.logprobs.shape))
    trainer.learning_phase(trainer.rollout_phase())
    assert seen[:5] == [
        ("before_minibatch", 4),
        ("after_loss", 4),
        (4, 6),
        ("after_backward", 4),
        ("after_step", 4),
    ]
    assert len(seen) == 4 * 5


@pytest.fixture(scope="module")
def policy() -> TransformerWithValueHead:
    torch.manual_seed(0)
    return TransformerWithValueHead(load_model("reel-nano"))


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_samples_in_parts_are_those_of_the_whole_batch(policy, truncation):
    """Prompts of 1, 3, 2 and 4 tokens, two at a time: a row's noise does not depend on the cut."""
    spec, prompts = SamplingSpec(5, **truncation), [[4], [5, 6, 7], [8, 9], [4, 5, 6, 7]]
    joined, whole = (
        sample_in_parts(policy, prompts, spec, torch.Generator().manual_seed(3), part_size=size)
        for size in (2, None)
    )
    assert torch.equal(joined.tokens, whole.tokens) and torch.equal(joined.mask, whole.mask)
    for name in ("logprobs", "values", "residuals"):
        found, expected = getattr(joined, name), getattr(whole, name)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    if truncation:
        kept = whole.support.kept
        assert torch.equal(joined.support.kept, kept)
        assert torch.equal(joined.support.tokens[kept], whole.support.tokens[kept])
    assert joined.prompts() == prompts and joined.tokens.shape == (4, 9)


def test_one_part_is_what_sample_gives(policy):
    spec, prompts = SamplingSpec(4), [[4], [5, 6]]
    whole = sample(policy, prompts, spec, torch.Generator().manual_seed(3))
    for size in (None, 2, 7):
        generator = torch.Generator().manual_seed(3)
        found = sample_in_parts(policy, prompts, spec, generator, part_size=size)
        assert torch.equal(found.tokens, whole.tokens)
    assert torch.equal(join_samples([whole], 0).tokens, whole.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 8])
def test_sampling_in_parts_starts_at_ratio_one(make_trainer, size):
    trainer = make_trainer(generation_batch_size=size, top_p=0.8)
    report = trainer.run_phase()
    assert report.kl_per_token == 0.0 and abs(report.ratio_first_minibatch - 1) < 1e-4


def test_the_three_batch_sizes_may_differ():
    args = RLHFArgs(preset="reel", generation_batch_size=100, micro_batch_size=4)
    assert (args.batch_size, args.minibatch_size, args.micro_batch_size) == (256, 32, 4)
