"""The proof of the packed form: held against the modules, on rows that the policy itself wrote."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.functional import generated_logits, generated_values
from rlhf_lab.models.decode import HookedDecoder
from rlhf_lab.models.fast.blocks import packed_residuals
from rlhf_lab.models.fast.decoder import PackedDecoder
from rlhf_lab.models.fast.fault import first_difference
from rlhf_lab.models.fast.outputs import packed_reference_logprobs, packed_token_stats
from rlhf_lab.models.hooks import has_hooks, without_hooks
from rlhf_lab.models.reference import final_residuals
from rlhf_lab.models.transformer_lens import HookedTransformer, final_logits
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.samples import Samples, Support

ROUNDING = MappingProxyType({"fp32": 1e-3, "bf16": 0.25})
"""How far rounding may take a log-probability, in nats, or a value, by the format of the products.

Measured: see `docs/performance.md`.
"""
ROWS, DECODED = 2, 8


class SampleRows(NamedTuple):
    """A few rows of a phase's samples."""

    tokens: Int[Tensor, "rows seq"]
    attention_mask: Bool[Tensor, "rows seq"] | None
    mask: Bool[Tensor, "rows gen"]
    support: Support | None
    prefix_len: int
    temperature: float


class Seen(NamedTuple):
    """What a form of the policy says of each generated token."""

    logprobs: Float[Tensor, "rows gen"]
    values: Float[Tensor, "rows gen"]


@dataclass(frozen=True)
class Proof:
    """What a comparison of the packed form with the modules came to.

    Args:
        gap: the largest difference of a log-probability, in nats, or of a value; as a share of its
            size where that is above 1.
        fault: the first part that differs beyond rounding, in words; None if none does.
    """

    gap: float
    fault: str | None


def take_rows(samples: Samples, temperature: float) -> tuple[SampleRows, Int[Tensor, " rows"]]:
    """The first and the last of the samples: of different prompts, if there are several."""
    batch = len(samples.tokens)
    rows = torch.tensor([0, batch - 1][: min(ROWS, batch)], device=samples.tokens.device)
    texts = SampleRows(
        tokens=samples.tokens[rows],
        attention_mask=samples.attention_mask[rows] if samples.is_padded else None,
        mask=samples.mask[rows],
        support=None if samples.support is None else samples.support[rows],
        prefix_len=samples.prefix_len,
        temperature=temperature,
    )
    return texts, rows


def prove(
    policy: TransformerWithValueHead,
    reference: HookedTransformer,
    samples: Samples,
    temperature: float,
    dtype: torch.dtype | None = None,
    first: bool = False,
    own_values: bool = True,
) -> Proof:
    """Hold the packed form against the modules on two rows of a phase's own samples.

    1. Run modules and packed form over the rows, both in the models' own precision and without the
       hooks of others, which are not to fire for this: log-probs and values must agree.
    2. Unless something is hooked on the policy, the log-probs and values that were noted when the
       samples were made must agree with the modules, too: they prove the decoding.
    3. At first, also compare the reference's two forms, decoding by modules with decoding packed,
       and the gradients of all parameters.

    Nothing random is drawn, and no gradient is left anywhere.

    Args:
        dtype: of the matrix products when the samples were made.
        first: whether to take step 3.
        own_values: whether the values that were noted are this policy's.
    """
    texts, rows = take_rows(samples, temperature)
    heard = has_hooks(policy)
    exact = ROUNDING["bf16" if _is_half(policy.base_model.cfg.dtype) else "fp32"]
    noting = ROUNDING["bf16" if _is_half(dtype or policy.base_model.cfg.dtype) else "fp32"]
    with _silently(policy, reference):
        with torch.no_grad():
            modules, packed = _by_modules(policy, texts), _by_packed(policy, texts)
            gaps = [_gap(packed, modules, texts.mask)]
            if not heard:
                noted, expected = [samples.logprobs[rows]], [modules.logprobs]
                if own_values:
                    noted.append(samples.values[rows])
                    expected.append(modules.values)
                gaps.append(_gap(noted, expected, texts.mask))
            gap, *decode_gap = torch.stack(gaps).tolist()
            found = max(gap, *decode_gap, 0.0)
            if not gap <= exact:
                return Proof(
                    found, first_difference(policy, texts.tokens, texts.attention_mask, exact)
                )
            if decode_gap and not decode_gap[0] <= noting:
                return Proof(found, "decoding")
            if first and not _reference_gap(reference, texts) <= exact:
                return Proof(found, "the reference")
            if first and not _decoding_gap(policy, texts) <= exact:
                return Proof(found, "decoding")
        if first and not _gradient_gap(policy, texts) <= exact:
            return Proof(found, "the gradient")
    return Proof(found, None)


@contextlib.contextmanager
def _silently(*modules: nn.Module) -> Iterator[None]:
    """Without hooks, and with the global random state as it was afterwards."""
    device = next(modules[0].parameters()).device
    cuda = [device] if device.type == "cuda" else []
    with without_hooks(*modules), torch.random.fork_rng(devices=cuda):
        yield


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _by_modules(policy: TransformerWithValueHead, texts: SampleRows) -> Seen:
    """What the modules and the readable functions say."""
    logits, values = policy(texts.tokens, texts.attention_mask)
    return Seen(_logprobs(logits, texts), generated_values(values, texts.prefix_len))


def _logprobs(
    logits: Float[Tensor, "rows seq d_vocab"], texts: SampleRows
) -> Float[Tensor, "rows gen"]:
    """Of the generated tokens, within the support: `get_logprobs` without its host reads."""
    scores = generated_logits(logits, texts.prefix_len).float() / texts.temperature
    if texts.support is not None:
        inside = torch.zeros_like(scores, dtype=torch.bool)
        inside = inside.scatter(-1, texts.support.tokens, texts.support.kept)
        scores = scores.masked_fill(~inside, -torch.inf)
    written = texts.tokens[:, texts.prefix_len :, None]
    return scores.log_softmax(-1).gather(-1, written)[..., 0]


def _by_packed(policy: TransformerWithValueHead, texts: SampleRows) -> Seen:
    """What the packed form says."""
    stats, values = packed_token_stats(
        policy,
        texts.tokens,
        texts.prefix_len,
        texts.temperature,
        texts.attention_mask,
        texts.support,
    )
    return Seen(stats.logprobs, values)


def _gap(
    found: Sequence[Tensor], expected: Sequence[Tensor], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """The largest difference at a real token; nan if one of two is not a number."""
    gaps = []
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours.float() - theirs.float()).abs() / theirs.float().abs().clamp(min=1)
        same = (ours == theirs) | (ours.isnan() & theirs.isnan()) | ~mask
        gaps.append(difference.masked_fill(same, 0.0).max())
    return torch.stack(gaps).max()


def _reference_gap(reference: HookedTransformer, texts: SampleRows) -> float:
    """The largest difference of a log-prob under the reference's two forms."""
    texts = texts._replace(support=None)
    states = slice(texts.prefix_len - 1, -1)
    written = texts.tokens[:, texts.prefix_len :]
    residual = final_residuals(reference, texts.tokens, texts.attention_mask)
    expected = _logprobs(final_logits(reference, residual), texts)
    packed = packed_residuals(reference, texts.tokens, texts.attention_mask)[:, states]
    found = packed_reference_logprobs(reference, packed, written, None, texts.temperature)
    return _gap((found,), (expected,), texts.mask).item()


def _decoding_gap(policy: TransformerWithValueHead, texts: SampleRows) -> float:
    """The largest difference between decoding packed and decoding by modules, in the first tokens.

    Log-probabilities of the whole vocabulary are compared, and values.
    """
    prefix_len, n = texts.prefix_len, min(DECODED, texts.mask.shape[1])
    prompts = texts.tokens[:, :prefix_len]
    mask = torch.ones_like(prompts, dtype=torch.bool)
    if texts.attention_mask is not None:
        mask = texts.attention_mask[:, :prefix_len]
    decoders = PackedDecoder(policy, prompts, mask, n), HookedDecoder(policy, prompts, mask)
    gaps = []
    for step in range(n):
        real = texts.mask[:, step]
        (logits, values), (expected, expected_values) = ((d.state[:2]) for d in decoders)
        logprobs, expected = (x.float().log_softmax(-1) for x in (logits, expected))
        gaps.append(_gap((logprobs,), (expected,), real[:, None].expand_as(logprobs)))
        gaps.append(_gap((values,), (expected_values,), real))
        if step + 1 < n:
            for decoder in decoders:
                decoder.feed(texts.tokens[:, prefix_len + step])
    return torch.stack(gaps).max().item()


@torch.enable_grad()
def _gradient_gap(policy: TransformerWithValueHead, texts: SampleRows) -> float:
    """The largest difference of an entry of the gradient, as a share of the largest of them all.

    The gradient is that of a sum of all that is read, each token with a weight of its own.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    weights = torch.linspace(0.5, 1.5, texts.mask.numel(), device=texts.mask.device)
    weights = (weights.view(texts.mask.shape) * texts.mask)[None]
    found = []
    for form in (_by_packed, _by_modules):
        seen = torch.stack([x.float() for x in form(policy, texts)])
        total = (seen.masked_fill(~texts.mask, 0.0) * weights).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        found.append([_flat(g, p) for g, p in zip(gradients, parameters, strict=True)])
    packed, modules = (torch.cat(gradients) for gradients in found)
    largest = modules.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((packed - modules).abs().max() / largest).item()


def _flat(gradient: Tensor | None, parameter: Tensor) -> Float[Tensor, " n"]:
    return (torch.zeros_like(parameter) if gradient is None else gradient).flatten().float()
