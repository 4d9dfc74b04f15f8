"""The objective of a minibatch, compared with float64 arithmetic token by token."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

from rlhf_lab.training import ReplayMemory, objective_terms
from tests.training.recorded_runs import move_weights

KL = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k3_straight_through": lambda d: math.exp(-d) - 1 + d,
}
SETTINGS = {
    "plain": {},
    "top_k": {"temperature": 1.3, "top_k": 5, "vf_clip": 0.01},
    "top_p": {"temperature": 0.7, "top_p": 0.8, "kl_in": "reward"},
    "raw advantages": {"normalize_advantages": False, "advantages": "one_step", "clip_coef": 0.05},
    **{name: {"kl_estimator": name, "kl_coef": 0.3, "top_k": 5} for name in KL},
}
TERMS = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty", "objective")


@pytest.fixture
def make_trainer(make_trainer):
    return partial(make_trainer, device="cpu")  # for numpy


def prepare(trainer):
    """Return a minibatch with a ragged mask, for a policy that has moved since it sampled."""
    generator = torch.Generator().manual_seed(0)
    minibatch = next(ReplayMemory(trainer.rollout_phase(), 2, 1).get_minibatches(generator))
    move_weights(trainer.policy)
    rows, gen = minibatch.mask.shape
    lengths = torch.arange(gen, gen - rows, -1).clamp(min=1)
    return dataclasses.replace(minibatch, mask=torch.arange(gen) < lengths[:, None])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def compute_by_hand(trainer, minibatch) -> dict[str, float]:
    """Return every term in float64, and the number of tokens that the clip affects."""
    args, prefix = trainer.args, minibatch.tokens.shape[1] - minibatch.mask.shape[1]
    with torch.no_grad():
        logits, values = (x.double().numpy() for x in trainer.policy(minibatch.tokens))
        ref_logits = trainer.reference(minibatch.tokens).double().numpy()
    real = [tuple(index) for index in minibatch.mask.nonzero().tolist()]
    advantages = np.array([minibatch.advantages[i, t].item() for i, t in real])
    if args.normalize_advantages:
        std = math.sqrt(advantages.var(ddof=1) + 1e-8)
        advantages = (advantages - advantages.mean()) / std
    surrogate = value_loss = entropy = kl = n_clipped = 0.0
    for (i, t), advantage in zip(real, advantages, strict=True):
        state, token = prefix - 1 + t, minibatch.tokens[i, prefix + t].item()
        z, ref = (x[i, state] / args.temperature for x in (logits, ref_logits))
        log_pi, log_ref = log_softmax(z), log_softmax(ref)
        allowed = np.zeros_like(z)
        if minibatch.support is not None:
            kept = minibatch.support.tokens[i, t][minibatch.support.kept[i, t]]
            allowed = np.full_like(z, -np.inf)
            allowed[kept.numpy()] = 0
        logprob, ref_logprob = (log_softmax(x + allowed)[token] for x in (z, ref))
        ratio = math.exp(logprob - minibatch.logprobs[i, t].item())
        clipped = min(max(ratio, 1 - args.clip_coef), 1 + args.clip_coef)
        n_clipped += clipped != ratio
        surrogate += min(ratio * advantage, clipped * advantage)
        value, target = values[i, state], minibatch.returns[i, t].item()
        error = (value - target) ** 2
        if args.vf_clip is not None:
            old = minibatch.values[i, t].item()
            limited = old + min(max(value - old, -args.vf_clip), args.vf_clip)
            error = max(error, (limited - target) ** 2)
        value_loss += error
        entropy -= (np.exp(log_pi) * log_pi).sum()
        if args.kl_estimator != "exact":
            assert minibatch.ref_logprobs[i, t].item() == pytest.approx(ref_logprob, abs=2e-5)
            kl += KL[args.kl_estimator](logprob - ref_logprob)
        elif args.kl_in == "loss":
            kl += (np.exp(log_pi) * (log_pi - log_ref)).sum()
    n = len(real)
    terms = [surrogate / n, args.vf_coef / 2 * value_loss / n]
    terms += [args.ent_coef * entropy / n, args.kl_coef * kl / n]
    total = terms[0] - terms[1] + terms[2] - terms[3]
    return dict(zip(TERMS, [*terms, total], strict=True)) | {"n_clipped": n_clipped}


@pytest.mark.parametrize("setting", SETTINGS)
def test_terms_match_sums_over_tokens_in_float64(make_trainer, setting):
    trainer = make_trainer(gen_len=10, ent_coef=0.3, **SETTINGS[setting])
    minibatch = prepare(trainer)
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    expected = compute_by_hand(trainer, minibatch)
    assert abs(expected["kl_penalty"]) > 1e-4 or setting == "top_p"
    assert expected["n_clipped"] > 0 or setting == "plain"
    for name in TERMS:
        assert getattr(terms, name).item() == pytest.approx(expected[name], rel=2e-4, abs=2e-6)
    free = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective, 0.0)
    assert free.kl_penalty == 0  # the current coefficient counts, not that of the settings
    assert not terms.logprobs.requires_grad and not terms.values.requires_grad
    terms.objective.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainer.policy.parameters())
    assert all(p.grad is None for p in trainer.reference.parameters())
    assert (minibatch.ref_logprobs is None) == (trainer.args.kl_estimator == "exact")


@pytest.mark.slow
@pytest.mark.typed
@pytest.mark.parametrize("estimator", ["exact", "k1", "k3"])
def test_kl_in_the_reward_is_subtracted_from_each_token(make_trainer, estimator):
    """Without values and discount, an advantage is the reward minus the KL from there on."""
    fields = {"kl_in": "reward", "kl_estimator": estimator, "kl_coef": 0.3, "gen_len": 26}
    fields |= {"advantages": "reinforce", "temperature": 20.0, "stop_tokens": "and"}
    trainer = make_trainer(**fields)
    move_weights(trainer.policy)
    rollout = trainer.rollout_phase()
    samples, kl = rollout.samples, rollout.kl.double()
    if estimator != "exact":
        gaps = samples.logprobs.double() - rollout.ref_logprobs.double()
        kl = gaps.clone().apply_(KL[estimator])
    assert not samples.mask.all()
    for i, length in enumerate(samples.mask.sum(1).tolist()):
        for t in range(length):
            expected = rollout.rewards[i].item() - 0.3 * kl[i, t:length].sum().item()
            assert rollout.advantages[i, t].item() == pytest.approx(expected, abs=1e-4)
    trainer.kl_controller.kl_coef = 0.0  # the current coefficient counts, not that of the settings
    free = trainer.rollout_phase()
    assert torch.equal(free.advantages[:, 0], free.rewards)
