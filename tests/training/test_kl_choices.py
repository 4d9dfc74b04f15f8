"""Where the KL is paid for, and from what it is read: objective and rewards, exact and sampled."""

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
TRUNCATIONS = {"all": {}, "top_k": {"top_k": 5, "temperature": 1.3}, "top_p": {"top_p": 0.8}}


def test_the_names_are_those_of_the_registry_and_exact():
    names = get_args(get_type_hints(RLHFArgs)["kl_estimator"])
    assert set(names) == {"exact", *F.KL_ESTIMATORS} == {"exact", *FORMULAS}


def moved(trainer: RLHFTrainer) -> RLHFTrainer:
    """The trainer with weights that are away from the reference's."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return trainer


def by_hand(logits: Tensor, token: int, temperature: float, allowed: list[int]) -> float:
    """The log-probability of a token among the allowed ones, in float64."""
    z = logits.double() / temperature
    return (z[token] - z[allowed].logsumexp(0)).item()


@pytest.mark.slow
@pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS.keys())
def test_the_references_logprobs_are_read_as_the_policys_are(make_trainer, truncation, listens):
    """Same temperature, and renormalised over the tokens that the policy's truncation kept."""
    trainer = moved(make_trainer(kl_estimator="k1", **truncation))
    if listens:
        trainer.reference.add_hook(listens, lambda x, hook: None)
    rollout = trainer.rollout_phase()
    samples, prefix = rollout.samples, rollout.samples.prefix_len
    with torch.no_grad():
        logits = trainer.reference(samples.tokens)
    for i, t in samples.mask.nonzero().tolist():
        allowed = list(range(logits.shape[-1]))
        if samples.support is not None:
            allowed = samples.support.tokens[i, t][samples.support.kept[i, t]].tolist()
        token = samples.tokens[i, prefix + t].item()
        expected = by_hand(logits[i, prefix - 1 + t], token, trainer.args.temperature, allowed)
        assert rollout.ref_logprobs[i, t].item() == pytest.approx(expected, abs=2e-5)


def prepared(trainer: RLHFTrainer):
    """A minibatch whose last tokens do not count."""
    minibatch = next(ReplayMemory(trainer.rollout_phase(), 2, 1).get_minibatches(torch.Generator()))
    mask = minibatch.mask.clone()
    mask[::2, -2:] = False
    return dataclasses.replace(minibatch, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", FORMULAS)
def test_an_estimate_in_the_loss_is_its_mean_over_the_real_tokens(make_trainer, estimator):
    trainer = moved(make_trainer(kl_estimator=estimator, kl_coef=0.3))
    minibatch = prepared(trainer)
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    gaps = (terms.logprobs.double() - minibatch.ref_logprobs.double())[minibatch.mask]
    expected = 0.3 * sum(FORMULAS[estimator](d) for d in gaps.tolist()) / len(gaps)
    assert terms.kl_penalty.item() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    total = terms.clipped_surrogate - terms.value_loss + terms.entropy_bonus - terms.kl_penalty
    assert terms.objective.item() == pytest.approx(total.item())
    assert abs(expected) > 1e-4


LEDGERS = [
    {"kl_estimator": "k3", "policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
    {"kl_in": "reward", "dual_clip": 3.0, "loss_aggregation": "constant"},
    {"micro_batch_size": 2, "max_log_ratio": 0.01, "clip_coef_high": 0.3},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", LEDGERS, ids=str)
def test_the_ledger_of_a_step_adds_up_whatever_the_terms_are(make_trainer, fields):
    trainer, gaps = make_trainer(ent_coef=0.1, base_lr=1e-3, **fields), []

    def compare(ctx):
        shares = ledger_entries(ctx.policy, ctx.reference, ctx.minibatch, ctx.args)["share"]
        gaps.append(abs(shares.sum().item() - ctx.terms.objective.item()))

    trainer.on("after_loss")(compare)
    trainer.learning_phase(trainer.rollout_phase())
    assert len(gaps) == 4 and max(gaps) < 1e-5


def kl_gradient(trainer: RLHFTrainer, minibatch) -> Tensor:
    """Of the penalty alone, with respect to the unembedding."""
    trainer.policy.zero_grad()
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    terms.kl_penalty.backward()
    return trainer.policy.base_model.unembed.W_U.grad.clone()


@pytest.mark.slow
def test_straight_through_has_k3s_value_and_k2s_gradient(make_trainer):
    gradients = {}
    for estimator in ("k2", "k3", "k3_straight_through"):
        trainer = moved(make_trainer(kl_estimator=estimator))
        gradients[estimator] = kl_gradient(trainer, prepared(trainer))
    torch.testing.assert_close(gradients["k3_straight_through"], gradients["k2"])
    assert not torch.allclose(gradients["k3"], gradients["k2"])


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["exact", "k1", "k3"])
def test_kl_in_the_reward_is_taken_off_each_token(make_trainer, estimator):
    """Without values and discount, an advantage is the reward minus the KL from there on."""
    trainer = moved(
        make_trainer(
            kl_in="reward",
            kl_estimator=estimator,
            kl_coef=0.3,
            advantages="reinforce",
            gen_len=26,
            temperature=20.0,
            stop_tokens="and",
        )
    )
    rollout = trainer.rollout_phase()
    samples, n_real = rollout.samples, rollout.samples.mask.sum(1).tolist()
    kl = rollout.kl.double()
    if estimator != "exact":
        gaps = samples.logprobs.double() - rollout.ref_logprobs.double()
        kl = gaps.clone().apply_(FORMULAS[estimator])
    assert min(n_real) < 26
    for i, length in enumerate(n_real):
        for t in range(length):
            expected = rollout.rewards[i].item() - 0.3 * kl[i, t:length].sum().item()
            assert rollout.advantages[i, t].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_kl_in_the_reward_leaves_none_in_the_loss(make_trainer, listens):
    trainer = moved(make_trainer(kl_in="reward"))
    minibatch = prepared(trainer)
    if listens:
        trainer.policy.base_model.add_hook(listens, lambda x, hook: None)
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    assert terms.kl_penalty.item() == 0.0
    total = terms.clipped_surrogate - terms.value_loss + terms.entropy_bonus
    assert terms.objective.item() == pytest.approx(total.item())


@pytest.mark.slow
def test_the_reward_pays_the_coefficient_that_is_in_force(make_trainer):
    trainer = moved(make_trainer(kl_in="reward", advantages="reinforce", kl_coef=0.3))
    before = trainer.rollout_phase()
    trainer.kl_controller.kl_coef = 0.0
    free = trainer.rollout_phase()
    assert torch.equal(free.advantages[:, 0], free.rewards)
    paid = F.kl_per_sequence(before.kl, before.samples.mask) * 0.3
    torch.testing.assert_close(before.advantages[:, 0], before.rewards - paid)


@pytest.mark.slow
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_estimated_kl_trains_and_repeats_itself(make_trainer, metrics_of, kl_in):
    runs = []
    for _ in range(2):
        trainer = make_trainer(kl_in=kl_in, kl_estimator="k3", kl_controller="adaptive")
        trainer.train()
        runs.append(metrics_of(trainer.run.path))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_the_exact_kl_keeps_no_logprobs_of_the_reference(make_trainer):
    assert make_trainer().rollout_phase().ref_logprobs is None


def test_an_own_penalty_that_would_be_left_unused_is_refused(reel_args):
    own = {"kl_penalty": lambda *given: F.calc_kl_penalty(*given)}
    for unused in ({"kl_in": "reward"}, {"kl_estimator": "k1"}):
        with pytest.raises(ConfigError, match="kl_penalty is called for kl_in='loss'"):
            RLHFTrainer(reel_args(**unused), **own)
