"""Penalty and estimates of the KL: in objective or rewards, exact or sampled."""

import dataclasses
import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.step_ledger import ledger_entries
from rlhf_lab.training import ReplayMemory, RLHFTrainer, objective_terms

FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k3_straight_through": lambda d: math.exp(-d) - 1 + d,
}


def test_names_are_those_of_the_registry_and_exact():
    names = get_args(get_type_hints(RLHFArgs)["kl_estimator"])
    assert set(names) == {"exact", *F.KL_ESTIMATORS} == {"exact", *FORMULAS}


def move(trainer: RLHFTrainer) -> RLHFTrainer:
    """Move the policy's weights away from the reference's."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [{"top_k": 5, "temperature": 1.3}, {"top_p": 0.8}, {}])
def test_reference_logprobs_match_float64(make_trainer, truncation, listens):
    """Same temperature, and renormalized over the tokens that the policy's truncation kept."""
    trainer = move(make_trainer(kl_estimator="k1", **truncation))
    if listens:
        trainer.reference.add_hook(listens, lambda x, hook: None)
    rollout = trainer.rollout_phase()
    samples, prefix = rollout.samples, rollout.samples.prefix_len
    with torch.no_grad():
        logits = trainer.reference(samples.tokens).double() / trainer.args.temperature
    for i, t in samples.mask.nonzero().tolist():
        z, token = logits[i, prefix - 1 + t], samples.tokens[i, prefix + t]
        allowed = z
        if samples.support is not None:
            allowed = z[samples.support.tokens[i, t][samples.support.kept[i, t]]]
        expected = (z[token] - allowed.logsumexp(0)).item()
        assert rollout.ref_logprobs[i, t].item() == pytest.approx(expected, abs=2e-5)


def prepare(trainer: RLHFTrainer):
    """Return a minibatch whose last tokens do not count."""
    minibatch = next(ReplayMemory(trainer.rollout_phase(), 2, 1).get_minibatches(torch.Generator()))
    mask = minibatch.mask.clone()
    mask[::2, -2:] = False
    return dataclasses.replace(minibatch, mask=mask)


def compute_terms(trainer: RLHFTrainer, minibatch):
    return objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", FORMULAS)
def test_sampled_kl_penalty_is_the_mean_over_real_tokens(make_trainer, estimator):
    trainer = move(make_trainer(kl_estimator=estimator, kl_coef=0.3))
    minibatch = prepare(trainer)
    terms = compute_terms(trainer, minibatch)
    gaps = (terms.logprobs.double() - minibatch.ref_logprobs.double())[minibatch.mask]
    expected = 0.3 * sum(FORMULAS[estimator](d) for d in gaps.tolist()) / len(gaps)
    assert terms.kl_penalty.item() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    total = terms.clipped_surrogate - terms.value_loss + terms.entropy_bonus - terms.kl_penalty
    assert terms.objective.item() == pytest.approx(total.item()) and abs(expected) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"kl_estimator": "k3", "policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
        {"kl_in": "reward", "dual_clip": 3.0, "loss_aggregation": "constant"},
        {"micro_batch_size": 2, "max_log_ratio": 0.01, "clip_coef_high": 0.3},
    ],
    ids=str,
)
def test_step_ledger_adds_up_to_the_objective(make_trainer, fields):
    trainer, gaps = make_trainer(ent_coef=0.1, base_lr=1e-3, **fields), []

    def compare(ctx):
        shares = ledger_entries(ctx.policy, ctx.reference, ctx.minibatch, ctx.args)["share"]
        gaps.append(abs(shares.sum().item() - ctx.terms.objective.item()))

    trainer.on("after_loss")(compare)
    trainer.learning_phase(trainer.rollout_phase())
    assert len(gaps) == 4 and max(gaps) < 1e-5


@pytest.mark.slow
def test_straight_through_has_the_gradient_of_k2(make_trainer):
    gradients = {}
    for estimator in ("k2", "k3", "k3_straight_through"):
        trainer = move(make_trainer(kl_estimator=estimator))
        compute_terms(trainer, prepare(trainer)).kl_penalty.backward()
        gradients[estimator] = trainer.policy.base_model.unembed.W_U.grad
    torch.testing.assert_close(gradients["k3_straight_through"], gradients["k2"])
    assert not torch.allclose(gradients["k3"], gradients["k2"])


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["exact", "k1", "k3"])
def test_kl_in_the_reward_is_subtracted_from_each_token(make_trainer, estimator):
    """Without values and discount, an advantage is the reward minus the KL from there on."""
    fields = {"kl_in": "reward", "kl_estimator": estimator, "kl_coef": 0.3, "gen_len": 26}
    fields |= {"advantages": "reinforce", "temperature": 20.0, "stop_tokens": "and"}
    trainer = move(make_trainer(**fields))
    rollout = trainer.rollout_phase()
    samples, kl = rollout.samples, rollout.kl.double()
    if estimator != "exact":
        gaps = samples.logprobs.double() - rollout.ref_logprobs.double()
        kl = gaps.clone().apply_(FORMULAS[estimator])
    assert not samples.mask.all()
    for i, length in enumerate(samples.mask.sum(1).tolist()):
        for t in range(length):
            expected = rollout.rewards[i].item() - 0.3 * kl[i, t:length].sum().item()
            assert rollout.advantages[i, t].item() == pytest.approx(expected, abs=1e-4)
    trainer.kl_controller.kl_coef = 0.0  # the current coefficient counts, not that of the settings
    free = trainer.rollout_phase()
    assert torch.equal(free.advantages[:, 0], free.rewards)


@pytest.mark.slow
def test_kl_in_the_reward_is_not_in_the_loss(make_trainer, listens):
    trainer = move(make_trainer(kl_in="reward"))
    minibatch = prepare(trainer)
    if listens:
        trainer.policy.base_model.add_hook(listens, lambda x, hook: None)
    terms = compute_terms(trainer, minibatch)
    assert terms.kl_penalty.item() == 0.0
    total: Tensor = terms.clipped_surrogate - terms.value_loss + terms.entropy_bonus
    assert terms.objective.item() == pytest.approx(total.item())


def test_exact_kl_needs_no_logprobs_of_the_reference(make_trainer):
    assert prepare(make_trainer()).ref_logprobs is None


@pytest.mark.parametrize("unused", [{"kl_in": "reward"}, {"kl_estimator": "k1"}])
def test_custom_penalty_that_is_not_called_raises(reel_args, unused):
    with pytest.raises(ConfigError, match="kl_penalty is called for kl_in='loss'"):
        RLHFTrainer(reel_args(**unused), kl_penalty=lambda *args: F.calc_kl_penalty(*args))
