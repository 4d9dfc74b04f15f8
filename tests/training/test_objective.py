"""The objective of a minibatch, compared with float64 arithmetic token by token."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training import Objective, Overrides, ReplayMemory, objective_terms
from tests.training.recorded_runs import copy_weights, is_equal

pytestmark = [pytest.mark.typed, pytest.mark.slow]

SETTINGS = {
    "plain": {},
    "top_k": {"temperature": 1.3, "top_k": 5, "vf_clip": 0.01},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "raw advantages": {"normalize_advantages": False, "advantages": "one_step", "clip_coef": 0.05},
}
TERMS = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty", "objective")


def disturb(policy: TransformerWithValueHead) -> None:
    """Move the weights, so ratios, values and KL differ from their starting values."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def prepare(trainer):
    """Return a minibatch with a ragged mask, for a policy that has moved since it sampled."""
    rollout = trainer.rollout_phase()
    generator = torch.Generator().manual_seed(0)
    minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(generator))
    disturb(trainer.policy)
    rows, gen = minibatch.mask.shape
    lengths = torch.arange(gen, gen - rows, -1).clamp(min=1)
    return dataclasses.replace(minibatch, mask=torch.arange(gen) < lengths[:, None])


def compute_terms(trainer, minibatch, policy=None):
    models = policy or trainer.policy, trainer.reference
    return objective_terms(*models, minibatch, trainer.objective)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def compute_by_hand(trainer, minibatch) -> dict[str, float]:
    """Return every term in float64, and how many tokens clips and truncation affect."""
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
        state = prefix - 1 + t
        token = minibatch.tokens[i, prefix + t].item()
        z = logits[i, state] / args.temperature
        log_pi, log_ref = log_softmax(z), log_softmax(ref_logits[i, state] / args.temperature)
        scored = z
        if minibatch.support is not None:
            kept = minibatch.support.kept[i, t].numpy()
            allowed = minibatch.support.tokens[i, t].numpy()[kept]
            scored = np.full_like(z, -np.inf)
            scored[allowed] = z[allowed]
        ratio = math.exp(log_softmax(scored)[token] - minibatch.logprobs[i, t].item())
        clipped = min(max(ratio, 1 - args.clip_coef), 1 + args.clip_coef)
        n_clipped += clipped != ratio
        surrogate += min(ratio * advantage, clipped * advantage)
        value, target = values[i, state], minibatch.returns[i, t].item()
        error = (value - target) ** 2
        if args.vf_clip is not None:
            old = minibatch.values[i, t].item()
            held = old + min(max(value - old, -args.vf_clip), args.vf_clip)
            error = max(error, (held - target) ** 2)
        value_loss += error
        entropy -= (np.exp(log_pi) * log_pi).sum()
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
    terms, expected = compute_terms(trainer, minibatch), compute_by_hand(trainer, minibatch)
    assert expected["kl_penalty"] > 1e-3 and not minibatch.mask.all()
    assert expected["n_clipped"] > 0 or setting == "plain"
    for name in TERMS:
        assert getattr(terms, name).item() == pytest.approx(expected[name], rel=2e-4, abs=2e-6)
    if minibatch.support is not None:  # without it, the probabilities are smaller
        whole = compute_terms(trainer, dataclasses.replace(minibatch, support=None))
        assert ((whole.logprobs - terms.logprobs)[minibatch.mask] < -0.01).any()


def test_objective_adds_and_subtracts_its_terms(make_trainer):
    """1 - 10 + 100 - 1000 = -909."""
    values = dict(zip(TERMS[:4], (1.0, 10.0, 100.0, 1000.0), strict=True))
    parts = {name: lambda *_, x=x: torch.tensor(x) for name, x in values.items()}
    trainer = make_trainer(parts)
    assert compute_terms(trainer, prepare(trainer)).objective.item() == -909.0


class Spied(TransformerWithValueHead):
    """Keeps its outputs and their gradients, and replaces them by garbage that is not 0."""

    garbage: Tensor | None = None

    def forward(self, *args, **kwargs):
        logits, values = super().forward(*args, **kwargs)
        if self.garbage is not None:
            logits = torch.where(self.garbage == 0, logits, self.garbage)
            values = torch.where(self.garbage[..., 0] == 0, values, 50.0)
        self.logits, self.values = logits, values
        logits.retain_grad()
        values.retain_grad()
        return logits, values


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("garbage", [50.0, 3e38, -math.inf])
def test_masked_positions_change_no_term_and_get_no_gradient(make_trainer, garbage, top_k):
    """The seed notebook averaged KL and entropy over the prompt and the last position too.

    Garbage is in all logits of some masked positions, and in all but one of the others.
    """
    trainer = make_trainer(ent_coef=0.3, top_k=top_k)
    minibatch = prepare(trainer)
    spied = Spied(trainer.policy.base_model, trainer.policy.value_head)
    counted = torch.zeros_like(minibatch.tokens, dtype=torch.bool)
    counted[:, minibatch.prefix_len - 1 : -1] = minibatch.mask
    expected = compute_terms(trainer, minibatch, spied)
    expected.objective.backward()
    gradient = spied.logits.grad.clone()
    for x in (gradient.abs().sum(-1), spied.values.grad.abs()):
        assert (x[~counted] == 0).all() and (x[counted] > 0).all()
    spied.garbage = torch.zeros_like(spied.logits).masked_fill(~counted[..., None], garbage)
    spied.garbage[::2, :, 3] = 0.0
    stale = {
        name: torch.where(minibatch.mask, getattr(minibatch, name), 7.0)
        for name in ("advantages", "returns", "logprobs", "values")
    }
    residuals = minibatch.ref_residuals + 50.0 * (~minibatch.mask)[..., None].float()
    noisy = dataclasses.replace(minibatch, ref_residuals=residuals, **stale)
    found = compute_terms(trainer, noisy, spied)
    found.objective.backward()
    assert all(getattr(found, name).item() == getattr(expected, name).item() for name in TERMS)
    assert torch.equal(spied.logits.grad[counted], gradient[counted])
    assert (spied.logits.grad[~counted] == 0).all()


def test_gradient_reaches_policy_and_value_head_only(make_trainer):
    trainer = make_trainer()
    terms = compute_terms(trainer, prepare(trainer))
    assert terms.objective.requires_grad
    assert not terms.logprobs.requires_grad and not terms.values.requires_grad
    terms.objective.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainer.policy.parameters())
    assert all(p.grad is None for p in trainer.reference.parameters())


DEFAULTS = {
    **{field.name: field.default for field in dataclasses.fields(Overrides)},
    "advantages": lambda values, rewards, mask: F.compute_advantages(values, rewards, mask),
    "policy_loss": lambda logprobs, old_logprobs, advantages, clip_coef, mask: F.ppo_surrogate(
        logprobs, old_logprobs, advantages, clip_coef, mask=mask
    ),
    "kl_estimator": lambda logprobs, ref_logprobs: F.kl_estimate(logprobs, ref_logprobs, "k1"),
}
FIELDS = {"advantages": "one_step", "normalize_advantages": False, "ent_coef": 0.01}


def run_halves(trainer):
    trainer.learning_phase(trainer.rollout_phase())
    return copy_weights(trainer.policy)


@pytest.mark.parametrize("name", DEFAULTS)
def test_custom_function_is_called_and_changes_the_run(make_trainer, name):
    calls = []

    def doubled(*inputs):
        calls.append(inputs)
        return 2 * DEFAULTS[name](*inputs)

    trainer = make_trainer({name: doubled}, **FIELDS)
    assert trainer.custom_components == [name]
    assert not is_equal(run_halves(trainer), run_halves(make_trainer(**FIELDS)))
    assert len(calls) == (1 if name in ("advantages", "normalize_reward") else 4)


def test_custom_functions_equal_to_the_defaults_change_nothing(make_trainer):
    """A custom `logprobs` runs the hooked modules, which differ by rounding."""
    elsewhere = ("logprobs", "policy_loss", "kl_estimator")
    own = {
        name: lambda *inputs, default=default: default(*inputs)
        for name, default in DEFAULTS.items()
        if name not in elsewhere
    }
    assert is_equal(run_halves(make_trainer(own, **FIELDS)), run_halves(make_trainer(**FIELDS)))


def terms_and_gradients(trainer, minibatch, overrides):
    trainer.policy.zero_grad()
    objective = Objective(trainer.args, overrides)
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, objective)
    terms.objective.backward()
    return terms, {name: p.grad.clone() for name, p in trainer.policy.named_parameters()}


@pytest.mark.parametrize("setting", ["plain", "top_k"])
def test_chunks_logits_and_hooked_modules_agree(make_trainer, setting, listens):
    """Terms and every gradient within 1e-5 of the largest entry."""
    trainer = make_trainer(**SETTINGS[setting])
    minibatch = prepare(trainer)
    terms, gradients = terms_and_gradients(trainer, minibatch, trainer.overrides)
    overrides = trainer.overrides
    if listens:
        trainer.policy.base_model.add_hook(listens, lambda x, hook: None)
    else:  # a custom function reads the logits of hooked modules
        overrides = dataclasses.replace(overrides, logprobs=lambda *args: F.get_logprobs(*args))
    expected, by_logits = terms_and_gradients(trainer, minibatch, overrides)
    for field in dataclasses.fields(terms):
        pair = (getattr(terms, field.name), getattr(expected, field.name))
        found, wanted = (x[minibatch.mask] if x.ndim else x for x in pair)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, msg=field.name)
    largest = max(gradient.abs().max() for gradient in by_logits.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        assert (gradient - by_logits[name]).abs().max() <= 1e-5 * largest, name


def test_bf16_changes_the_terms_by_little(make_trainer, listens):
    """8 bits of mantissa: log-probabilities and values move by at most a few hundredths."""
    trainer = make_trainer()
    minibatch = prepare(trainer)
    exact = compute_terms(trainer, minibatch)
    if listens:
        trainer.policy.base_model.add_hook(listens, lambda x, hook: None)
    args = dataclasses.replace(trainer.args, precision="bf16")
    objective = Objective(args, trainer.overrides)
    rough = objective_terms(trainer.policy, trainer.reference, minibatch, objective)
    for name in ("logprobs", "values"):
        gap = (getattr(rough, name) - getattr(exact, name))[minibatch.mask].abs().max().item()
        assert 0 < gap < 0.05
    assert rough.objective.dtype == torch.float32
    assert rough.objective.item() == pytest.approx(exact.objective.item(), abs=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equal_weights_have_a_kl_of_exactly_zero(make_trainer, listens, precision):
    trainer = make_trainer(precision=precision)
    if listens:
        trainer.policy.base_model.add_hook(listens, lambda x, hook: None)
    kl = trainer.rollout_phase().kl.abs().max()
    if listens == "blocks.0.attn.hook_pattern":  # the reference uses the fused attention
        assert kl < (1e-5 if precision == "fp32" else 1e-2)
    else:
        assert kl == 0


@pytest.mark.parametrize("settings", [{}, {"top_k": 5, "temperature": 1.3}], ids=["all", "top_k"])
def test_hook_that_reads_changes_no_sample(make_trainer, settings):
    trainer = make_trainer(**settings)
    disturb(trainer.policy)
    found = trainer.rollout_phase()
    trainer.policy.base_model.add_hook("hook_embed", lambda x, hook: None)
    expected = trainer.rollout_phase()
    assert torch.equal(found.samples.tokens, expected.samples.tokens)
    for name in ("kl", "entropy", "advantages", "ref_residuals"):
        a, b = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4, msg=name)
    for name in ("logprobs", "values"):
        a, b = getattr(found.samples, name), getattr(expected.samples, name)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=name)


def test_custom_advantages_and_rewards_are_in_the_rollout(make_trainer):
    """Rewards 3, advantages 2 everywhere, so returns are 2 + values."""
    parts = {
        "normalize_reward": lambda rewards: torch.full_like(rewards, 3.0),
        "advantages": lambda values, rewards, mask: 2.0 + 0 * values + (rewards - 3)[:, None],
    }
    rollout = make_trainer(parts).rollout_phase()
    mask = rollout.samples.mask
    assert (rollout.rewards == 3.0).all() and not (rollout.raw_rewards == 3.0).any()
    assert (rollout.advantages == 2.0).all()
    assert torch.equal(rollout.returns[mask], rollout.samples.values.add(2)[mask])


@pytest.mark.parametrize(("name", "expected"), [("one_step", -0.25), ("gae", 0.125)])
def test_estimator_is_that_of_the_settings(reel_args, name, expected):
    """Values 0.5, 0.25 and reward 1: one-step [-0.25, 0.75]; GAE(1, 0.5) [-0.25 + 0.375, 0.75]."""
    values, rewards = torch.tensor([[0.5, 0.25]]), torch.tensor([1.0])
    args = reel_args(advantages=name, gae_lambda=0.5)
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = Overrides().estimate_advantages(args, values, rewards, mask)
    assert found.tolist() == [[expected, 0.75]]
