"""The objective of a minibatch, against plain float64 arithmetic token by token."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training import (
    Objective,
    Overrides,
    ReplayMemory,
    RLHFTrainer,
    objective_terms,
)
from rlhf_lab.training.run_loop import EVALUATION_BATCHES

pytestmark = pytest.mark.typed

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"top_p": 0.8},
    "value_clip": {"vf_clip": 0.01},
    "raw_advantages": {"normalize_advantages": False},
    "one_step": {"advantages": "one_step", "clip_coef": 0.05},
}


def disturb(policy: TransformerWithValueHead, scale: float = 0.02) -> None:
    """Move the weights, so that ratios, values and KL are away from their starting values."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def ragged(mask: Tensor) -> Tensor:
    """Row i keeps its first gen - i tokens, at least one."""
    rows, gen = mask.shape
    lengths = torch.arange(gen, gen - rows, -1).clamp(min=1)
    return torch.arange(gen) < lengths[:, None]


def prepare(trainer):
    """A minibatch with a ragged mask, scored by a policy that has moved since it sampled."""
    rollout = trainer.rollout_phase()
    generator = torch.Generator().manual_seed(0)
    minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(generator))
    disturb(trainer.policy)
    return dataclasses.replace(minibatch, mask=ragged(minibatch.mask))


def terms_of(trainer, minibatch, policy=None):
    return objective_terms(
        policy or trainer.policy, trainer.reference, minibatch, trainer.objective
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of one row, in float64; -inf stays -inf."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def by_hand(trainer, minibatch) -> dict[str, float]:
    """Every term in float64 numpy, one token after the other."""
    args, prefix = trainer.args, minibatch.tokens.shape[1] - minibatch.mask.shape[1]
    with torch.no_grad():
        logits, values = (x.double().numpy() for x in trainer.policy(minibatch.tokens))
        ref_logits = trainer.reference(minibatch.tokens).double().numpy()
    real = [tuple(index) for index in minibatch.mask.nonzero().tolist()]
    raw = np.array([minibatch.advantages[i, t].item() for i, t in real])
    advantages = raw
    if args.normalize_advantages:
        advantages = (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)
    surrogate = value_loss = entropy = kl = 0.0
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
    terms = {
        "clipped_surrogate": surrogate / n,
        "value_loss": args.vf_coef / 2 * value_loss / n,
        "entropy_bonus": args.ent_coef * entropy / n,
        "kl_penalty": args.kl_coef * kl / n,
    }
    terms["objective"] = (
        terms["clipped_surrogate"]
        - terms["value_loss"]
        + terms["entropy_bonus"]
        - terms["kl_penalty"]
    )
    return terms


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_four_terms_equal_the_sum_over_tokens_in_float64(make_trainer, setting):
    trainer = make_trainer(gen_len=10, ent_coef=0.3, **SETTINGS[setting])
    minibatch = prepare(trainer)
    terms, expected = terms_of(trainer, minibatch), by_hand(trainer, minibatch)
    assert expected["kl_penalty"] > 1e-3
    for name, value in expected.items():
        assert getattr(terms, name).item() == pytest.approx(value, rel=2e-4, abs=2e-6), name


@pytest.mark.slow
def test_the_settings_matter_to_the_terms(make_trainer):
    """The comparison above would be empty if clipping, support or value clip never took hold."""
    trainer = make_trainer(gen_len=10, temperature=1.3, top_k=5, vf_clip=0.01, clip_coef=0.05)
    minibatch = prepare(trainer)
    terms = terms_of(trainer, minibatch)
    real = minibatch.mask
    ratio = (terms.logprobs - minibatch.logprobs)[real].exp()
    assert ((ratio - 1).abs() > trainer.args.clip_coef).any()
    assert ((terms.values - minibatch.values)[real].abs() > 0.01).any()
    without = dataclasses.replace(minibatch, support=None)
    gap = (terms_of(trainer, without).logprobs - terms.logprobs)[real]
    assert (gap < -0.01).any()
    assert not minibatch.mask.all()


def test_the_objective_adds_surrogate_and_entropy_and_subtracts_value_loss_and_kl(make_trainer):
    """1 - 10 + 100 - 1000 = -909."""
    parts = {
        "clipped_surrogate": lambda *_: torch.tensor(1.0),
        "value_loss": lambda *_: torch.tensor(10.0),
        "entropy_bonus": lambda *_: torch.tensor(100.0),
        "kl_penalty": lambda *_: torch.tensor(1000.0),
    }
    trainer = make_trainer(parts)
    assert terms_of(trainer, prepare(trainer)).objective.item() == -909.0


class Spied(TransformerWithValueHead):
    """Keeps its outputs, so that their gradients can be read; adds noise where it is told to."""

    noise: Tensor | None = None
    garbage: Tensor | None = None

    def forward(self, *args, **kwargs):
        logits, values = super().forward(*args, **kwargs)
        if self.noise is not None:
            logits = logits + self.noise[..., None] * torch.randn_like(logits)
            values = values + self.noise
        if self.garbage is not None:
            logits = torch.where(self.garbage == 0, logits, self.garbage)
        self.logits, self.values = logits, values
        logits.retain_grad()
        values.retain_grad()
        return logits, values


def spy_on(policy: TransformerWithValueHead) -> Spied:
    return Spied(policy.base_model, policy.value_head)


def counted_states(minibatch) -> Tensor:
    """True at the states before real generated tokens: position prefix_len - 1 + t."""
    states = torch.zeros_like(minibatch.tokens, dtype=torch.bool)
    states[:, minibatch.prefix_len - 1 : -1] = minibatch.mask
    return states


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 5])
def test_only_states_before_real_generated_tokens_get_a_gradient(make_trainer, top_k):
    """The seed notebook averaged KL and entropy over the prompt and the last position too."""
    trainer = make_trainer(ent_coef=0.3, top_k=top_k)
    minibatch = prepare(trainer)
    spied = spy_on(trainer.policy)
    terms_of(trainer, minibatch, spied).objective.backward()
    counted = counted_states(minibatch)
    for gradient in (spied.logits.grad.abs().sum(-1), spied.values.grad.abs()):
        assert (gradient[~counted] == 0).all()
        assert (gradient[counted] > 0).all()


@pytest.mark.slow
def test_noise_at_the_prompt_and_after_the_stop_changes_no_term(make_trainer):
    trainer = make_trainer(ent_coef=0.3)
    minibatch = prepare(trainer)
    spied, counted = spy_on(trainer.policy), counted_states(minibatch)
    before = terms_of(trainer, minibatch, spied)
    spied.noise = 50.0 * (~counted).float()
    residuals = minibatch.ref_residuals + 50.0 * (~minibatch.mask)[..., None].float()
    stale = {
        name: torch.where(minibatch.mask, getattr(minibatch, name), 7.0)
        for name in ("advantages", "returns", "logprobs", "values")
    }
    noisy = dataclasses.replace(minibatch, ref_residuals=residuals, **stale)
    after = terms_of(trainer, noisy, spied)
    for name in ("objective", "clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty"):
        assert getattr(after, name).item() == getattr(before, name).item(), name
    spied.noise = 50.0 * counted.float()
    assert terms_of(trainer, minibatch, spied).kl_penalty > 2 * before.kl_penalty


@pytest.mark.slow
def test_the_gradient_goes_to_policy_and_value_head_and_not_to_the_reference(make_trainer):
    trainer = make_trainer()
    minibatch = prepare(trainer)
    terms_of(trainer, minibatch).objective.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainer.policy.parameters())
    assert all(p.grad is None for p in trainer.reference.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("garbage", [3e38, -3e38, math.inf, -math.inf])
def test_garbage_logits_at_masked_tokens_change_nothing(make_trainer, garbage, top_k):
    """In every entry of some masked rows, and in all entries but one of the others."""
    trainer = make_trainer(ent_coef=0.3, top_k=top_k)
    minibatch = prepare(trainer)
    spied, counted = spy_on(trainer.policy), counted_states(minibatch)
    expected = terms_of(trainer, minibatch, spied)
    expected.objective.backward()
    wanted = spied.logits.grad.clone()
    spied.garbage = torch.zeros_like(spied.logits).masked_fill(~counted[..., None], garbage)
    spied.garbage[::2, :, 3] = 0.0
    found = terms_of(trainer, minibatch, spied)
    found.objective.backward()
    assert found.objective.item() == expected.objective.item()
    assert spied.logits.grad.isfinite().all()
    assert torch.equal(spied.logits.grad[counted], wanted[counted])
    assert (spied.logits.grad[~counted] == 0).all()


def test_logprobs_and_values_are_handed_on_without_a_graph(make_trainer):
    trainer = make_trainer()
    terms = terms_of(trainer, prepare(trainer))
    assert not terms.logprobs.requires_grad and not terms.values.requires_grad
    assert terms.objective.requires_grad


def one_step(values, rewards, mask):
    return F.compute_advantages(values, rewards, mask)


def ppo(logprobs, old_logprobs, advantages, clip_coef, mask):
    return F.ppo_surrogate(logprobs, old_logprobs, advantages, clip_coef, mask=mask)


DEFAULTS = {
    **{f.name: f.default for f in dataclasses.fields(Overrides)},
    "advantages": one_step,
    "policy_loss": ppo,
    "kl_estimator": lambda logprobs, ref_logprobs: F.kl_estimate(logprobs, ref_logprobs, "k1"),
}


ALSO_BY_NAME = ("policy_loss", "kl_estimator")
"""Parts that stand beside another part's default, not in its place."""

FUNCTION_RUN = {
    "total_phases": 1,
    "warmup_steps": 0,
    "advantages": "one_step",
    "normalize_advantages": False,
    "ent_coef": 0.01,
}


@pytest.fixture(scope="module")
def unchanged_weights(tmp_path_factory, reel_args):
    """The last weights of a run with the default functions."""
    out = tmp_path_factory.mktemp("functions") / "run"
    trainer = RLHFTrainer(reel_args(**FUNCTION_RUN), out=out)
    trainer.train()
    return copy.deepcopy(trainer.policy.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Overrides)])
def test_the_callers_own_function_is_called_and_drives_the_run(
    make_trainer, unchanged_weights, name
):
    """Each function is doubled; the weights must come out otherwise."""
    calls = []

    def doubled(*given):
        calls.append(given)
        return 2 * DEFAULTS[name](*given)

    trainer = make_trainer({name: doubled}, **FUNCTION_RUN)
    trainer.train()
    per_batch = name in ("advantages", "normalize_reward")
    assert len(calls) == (1 + EVALUATION_BATCHES if per_batch else 4)
    assert trainer.custom_components == [name]
    weights = trainer.policy.state_dict()
    assert any(not torch.equal(weights[key], unchanged_weights[key]) for key in weights)


@pytest.mark.slow
def test_own_functions_that_repeat_the_defaults_change_nothing(make_trainer, unchanged_weights):
    """`logprobs` is left out: a custom one runs the hooked modules, see below."""
    own = {
        name: lambda *given, default=default: default(*given)
        for name, default in DEFAULTS.items()
        if name not in ("logprobs", *ALSO_BY_NAME)
    }
    trainer = make_trainer(own, **FUNCTION_RUN)
    trainer.train()
    weights = trainer.policy.state_dict()
    assert all(torch.equal(weights[key], unchanged_weights[key]) for key in weights)


def custom_logprobs(trainer):
    """The default log-probabilities as a custom function, which reads logits of hooked modules."""
    return dataclasses.replace(trainer.overrides, logprobs=lambda *given: F.get_logprobs(*given))


def terms_and_gradients(trainer, minibatch, functions):
    trainer.policy.zero_grad()
    objective = Objective(trainer.args, functions)
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, objective)
    terms.objective.backward()
    return terms, {name: p.grad.clone() for name, p in trainer.policy.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_chunks_logits_and_hooked_modules_lead_to_the_same_objective(
    make_trainer, settings, listens
):
    """Terms and every gradient within 1e-5 of the largest entry; the policy has moved."""
    trainer = make_trainer(**settings)
    minibatch = prepare(trainer)
    terms, gradients = terms_and_gradients(trainer, minibatch, trainer.overrides)
    functions = trainer.overrides if listens else custom_logprobs(trainer)
    if listens:
        trainer.policy.base_model.add_hook(listens, lambda x, hook: None)
    expected, by_logits = terms_and_gradients(trainer, minibatch, functions)
    for field in dataclasses.fields(terms):
        pair = (getattr(terms, field.name), getattr(expected, field.name))
        found, wanted = (x[minibatch.mask] if x.ndim else x for x in pair)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, msg=field.name)
    largest = max(gradient.abs().max() for gradient in by_logits.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        assert (gradient - by_logits[name]).abs().max() <= 1e-5 * largest, name


@pytest.mark.slow
def test_bf16_products_change_the_terms_by_little(make_trainer, listens):
    """8 bits of mantissa: log-probabilities and values move by a few hundredths, not more."""
    trainer = make_trainer()
    minibatch = prepare(trainer)
    exact = terms_of(trainer, minibatch)
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


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equal_weights_are_at_a_distance_of_exactly_0(make_trainer, listens, precision):
    trainer = make_trainer(precision=precision)
    if listens:
        trainer.policy.base_model.add_hook(listens, lambda x, hook: None)
    kl = trainer.rollout_phase().kl
    if listens == "blocks.0.attn.hook_pattern":  # the reference uses the fused attention
        assert kl.abs().max() < (1e-5 if precision == "fp32" else 1e-2)
    else:
        assert torch.equal(kl, torch.zeros(trainer.args.batch_size, 6))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"top_k": 5, "temperature": 1.3}], ids=["all", "top_k"])
def test_the_same_seed_gives_the_same_samples_with_and_without_a_hook(make_trainer, settings):
    """And the same KL and entropy, which are read from what the sampler noted."""
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


def test_own_advantages_and_rewards_are_what_the_rollout_holds(make_trainer):
    """Rewards 3, ..., advantages 2 everywhere, so returns are 2 + values."""
    parts = {
        "normalize_reward": lambda rewards: torch.full_like(rewards, 3.0),
        "advantages": lambda values, rewards, mask: 2.0 + 0 * values + (rewards - 3)[:, None],
    }
    rollout = make_trainer(parts).rollout_phase()
    assert (rollout.rewards == 3.0).all()
    assert (rollout.advantages == 2.0).all()
    assert torch.equal(
        rollout.returns[rollout.samples.mask], rollout.samples.values.add(2)[rollout.samples.mask]
    )
    assert not (rollout.raw_rewards == 3.0).any()


def test_each_estimator_is_the_one_that_args_name(make_trainer, reel_args):
    """Values 0.5, 0.25 and reward 1: one-step [-0.25, 0.75]; gae 1, 0.5: [-0.25 + 0.375, 0.75]."""
    values, rewards = torch.tensor([[0.5, 0.25]]), torch.tensor([1.0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    functions = Overrides()
    one = functions.estimate_advantages(reel_args(advantages="one_step"), values, rewards, mask)
    assert one.tolist() == [[-0.25, 0.75]]
    gae = functions.estimate_advantages(
        reel_args(advantages="gae", gae_lambda=0.5), values, rewards, mask
    )
    assert gae.tolist() == [[0.125, 0.75]]


def test_a_part_that_does_not_exist_is_refused_with_those_that_do(reel_args):
    with pytest.raises(ConfigError, match="no component 'kl_penlty'. Choose .*kl_penalty"):
        RLHFTrainer(reel_args(), kl_penlty=F.calc_kl_penalty)
