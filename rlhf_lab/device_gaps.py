"""Comparison of a device with the CPU on what training runs there, on the bundled policy."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import TransformerWithValueHead, load_model, make_reference, run_policy
from rlhf_lab.models.device import validate_half_precision, where_exact
from rlhf_lab.models.reference import final_residuals
from rlhf_lab.probes.direction import fit_direction
from rlhf_lab.probes.value_lens import fit_ridge
from rlhf_lab.probes.weight_delta import spectrum
from rlhf_lab.samples import Samples, Support
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts
from rlhf_lab.training import Objective, ReplayMinibatch, objective_terms

PROMPT, ROWS, GEN_LEN, SEED, NOISE = "this movie", 16, 24, 0, 0.02


class Compared(NamedTuple):
    """How far a device is from the CPU in one thing that training does.

    Args:
        what: what differs, in words.
        gap: nan or infinite where what the device gave is.
        allowed: what rounding may make of it.
    """

    what: str
    gap: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the gap is a number, and allowed."""
        return self.gap <= self.allowed


def forward_gap(device: str) -> Compared:
    """Logits and values of whole texts, through the modules."""
    with torch.no_grad():
        on_cpu, there = (
            policy(_random_tokens(policy)) for policy in map(_policy_on, ("cpu", device))
        )
    gap = _worst(_largest(a, b) for a, b in zip(on_cpu, there, strict=True))
    return Compared("logits and values differ from the CPU's", gap, 1e-3)


def sampling_gap(device: str) -> Compared:
    """Log-probs and values of what the device wrote, as it noted them, and as the CPU finds them.

    A token that truncation had removed has a log-prob of -inf.
    """
    samples = _samples_of(device)
    host = _moved(samples, "cpu")
    policy = _policy_on("cpu")
    with torch.no_grad():
        out = run_policy(policy, host.tokens, host.prefix_len, support=host.support)
    gap = _worst([_largest(host.logprobs, out.logprobs), _largest(host.values, out.values)])
    return Compared("log-probs and values of its samples differ from the CPU's", gap, 1e-3)


def objective_gap(device: str) -> Compared:
    """The objective of what the device wrote, and its whole gradient, relative to the largest."""
    samples = _samples_of(device)
    (objective, gradient), (expected, expected_gradient) = (
        _objective_and_gradient(_moved(samples, place), place) for place in (device, "cpu")
    )
    scale = expected_gradient.abs().max().item()
    gap = _worst([_largest(objective, expected), _largest(gradient, expected_gradient) / scale])
    return Compared("objective and gradient differ from the CPU's", gap, 1e-3)


def probes_gap(device: str) -> Compared:
    """Spectrum, direction and ridge regression of the same numbers, where probes take them."""
    generator = torch.Generator().manual_seed(SEED)
    x, y = torch.randn(96, 16, generator=generator), torch.randn(96, generator=generator)
    found, expected = [], []
    for place, kept in ((device, found), ("cpu", expected)):
        there, target = where_exact(x.to(place)), where_exact(y.to(place))
        kept.append(spectrum(x.to(place))[0])
        kept.extend(fit_direction(there, target > 0, "lda"))
        kept.extend(fit_ridge(there, target, torch.ones_like(target, dtype=torch.bool), 1e-6))
    gap = _worst(_largest(a, b) for a, b in zip(found, expected, strict=True))
    return Compared("the probes' linear algebra differs from the CPU's", gap, 1e-4)


@torch.no_grad()
def bf16_gap(device: str) -> Compared:
    """Last residuals with products in bf16, beside the CPU's in fp32; relative to the largest.

    Attention to later tokens would show here, too: it is off by far more than rounding.

    Raises:
        ConfigError: training refuses bf16 there.
    """
    validate_half_precision(torch.device(device), torch.bfloat16, "precision='bf16'")
    half, full = (
        final_residuals(policy.base_model, _random_tokens(policy), dtype=dtype)
        for policy, dtype in ((_policy_on(device), torch.bfloat16), (_policy_on("cpu"), None))
    )
    gap = _largest(half, full) / full.abs().max().item()
    return Compared("residuals in bf16 differ from the CPU's in fp32", gap, 2e-2)


COMPARISONS: tuple[Callable[[str], Compared], ...] = (
    forward_gap,
    sampling_gap,
    objective_gap,
    probes_gap,
    bf16_gap,
)


def _policy_on(device: str) -> TransformerWithValueHead:
    """The bundled policy with noise on all its weights, so that it is not its own reference."""
    policy = TransformerWithValueHead(load_model("reel-nano")).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += NOISE * torch.randn(parameter.shape, generator=generator)
    return policy.to(device)


def _samples_of(device: str) -> Samples:
    """What the policy writes there, with truncation."""
    policy = _policy_on(device)
    prompts = tokenize_prompts(policy.base_model.tokenizer, [PROMPT] * ROWS, prepend_bos=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return sample(policy, prompts, SamplingSpec(GEN_LEN, top_p=0.9))


def _moved(samples: Samples, device: str) -> Samples:
    """Samples on another device."""
    parts = {field.name: getattr(samples, field.name) for field in dataclasses.fields(samples)}
    moved = {name: x.to(device) for name, x in parts.items() if isinstance(x, Tensor)}
    support = Support(samples.support.tokens.to(device), samples.support.kept.to(device))
    return dataclasses.replace(samples, **moved, support=support)


def _random_tokens(policy: TransformerWithValueHead) -> Int[Tensor, "batch seq"]:
    """The same tokens on every device."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(policy.base_model.cfg.d_vocab, (8, 29), generator=generator)
    return tokens.to(policy.device)


def _objective_and_gradient(
    samples: Samples, device: str
) -> tuple[Float[Tensor, ""], Float[Tensor, " weights"]]:
    """The objective of all samples as one minibatch, and its gradient, as one vector."""
    policy, prefix_len = _policy_on(device), samples.prefix_len
    reference = make_reference(load_model("reel-nano", device=device))
    residuals = final_residuals(reference, samples.tokens)[:, prefix_len - 1 : -1]
    advantages = torch.linspace(-1, 1, samples.mask.numel()).view(samples.mask.shape).to(device)
    minibatch = ReplayMinibatch(
        tokens=samples.tokens,
        attention_mask=samples.attention_mask,
        mask=samples.mask,
        logprobs=samples.logprobs,
        values=samples.values,
        advantages=advantages,
        returns=advantages.flip(0),
        ref_residuals=residuals,
        support=samples.support,
        padded=False,
    )
    args = RLHFArgs(preset="reel", batch_size=ROWS, gen_len=GEN_LEN)
    terms = objective_terms(policy, reference, minibatch, Objective(args))
    terms.objective.backward()
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return terms.objective.detach(), torch.cat(gradients)


def _largest(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors, wherever they are; nan where one of them has it."""
    return (a.cpu() - b.cpu()).abs().max().item()


def _worst(gaps: Iterable[float]) -> float:
    """The largest; nan where one of them is, which `max` may leave out."""
    return torch.tensor(list(gaps)).max().item()
