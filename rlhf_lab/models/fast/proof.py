"""The proof of the packed form: held against the modules, on rows that the policy itself wrote."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional import generated_logits, generated_values
from rlhf_lab.models.decode import HookedDecoder
from rlhf_lab.models.device import LOGPROB_ROUNDING, float32_products
from rlhf_lab.models.fast.blocks import packed_residuals
from rlhf_lab.models.fast.decoder import PackedDecoder
from rlhf_lab.models.fast.fault import first_difference
from rlhf_lab.models.fast.outputs import packed_token_stats
from rlhf_lab.models.fast.readout import final_norm, read_token_stats
from rlhf_lab.models.hooks import has_hooks, without_hooks
from rlhf_lab.models.reference import final_residuals
from rlhf_lab.models.transformer_lens import HookedTransformer, final_logits
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.samples import Samples, Support

DECODED = 8


class SampleRows(NamedTuple):
    """A few of a phase's samples, the mask of their padding, if any, and the temperature."""

    samples: Samples
    attention_mask: Bool[Tensor, "rows seq"] | None
    temperature: float


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


def prove(
    policy: TransformerWithValueHead,
    reference: HookedTransformer,
    samples: Samples,
    temperature: float,
    dtype: torch.dtype | None = None,
    first: bool = False,
    own_values: bool = True,
    tf32: bool = False,
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
        tf32: whether products were in TF32 when the samples were made; they are not here.
    """
    # the first and the last: of different prompts, if there are several
    ends = torch.tensor([0, len(samples.mask) - 1][: len(samples.mask)])
    rows = samples[ends.to(samples.mask.device)]
    texts = SampleRows(rows, rows.attention_mask if samples.is_padded else None, temperature)
    heard, own_dtype = has_hooks(policy), policy.base_model.cfg.dtype
    exact, noting = _rounding(own_dtype), _rounding(dtype or own_dtype, tf32)
    cuda = [policy.device] if policy.device.type == "cuda" else []
    products = float32_products("fp32") if tf32 else nullcontext()
    with (
        without_hooks(policy, reference),
        torch.random.fork_rng(devices=cuda),
        torch.no_grad(),
        products,
    ):
        modules, packed = _by_modules(policy, texts), _by_packed(policy, texts)
        gaps = [_gap(packed, modules, rows.mask)]
        if not heard:
            seen = 2 if own_values else 1
            noted = torch.stack([rows.logprobs, rows.values])[:seen]
            gaps.append(_gap(noted, modules[:seen], rows.mask))
        gap, *decode_gap = torch.stack(gaps).tolist()
        if not gap <= exact:
            fault = first_difference(policy, rows.tokens, texts.attention_mask, exact)
        elif decode_gap and not decode_gap[0] <= noting:
            fault = "decoding"
        elif first and not _reference_gap(reference, texts) <= exact:
            fault = "the reference"
        elif first and not _decoding_gap(policy, texts) <= exact:
            fault = "decoding"
        elif first and not _gradient_gap(policy, texts) <= exact:
            fault = "the gradient"
        else:
            fault = None
    return Proof(max(gap, *decode_gap, 0.0), fault)


def _rounding(dtype: torch.dtype, tf32: bool = False) -> float:
    """How far rounding may take a log-probability, in nats, or a value, by the products' format.

    Measured: see `docs/performance.md`.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return LOGPROB_ROUNDING["bf16"]
    return LOGPROB_ROUNDING["tf32" if tf32 else "fp32"]


def _by_modules(policy: TransformerWithValueHead, texts: SampleRows) -> Float[Tensor, "2 rows gen"]:
    """Log-probs and values of the generated tokens by the modules and the readable functions."""
    samples = texts.samples
    logits, values = policy(samples.tokens, texts.attention_mask)
    values = generated_values(values, samples.prefix_len)
    return torch.stack([_logprobs(logits, texts, samples.support), values.float()])


def _logprobs(
    logits: Float[Tensor, "rows seq d_vocab"], texts: SampleRows, support: Support | None = None
) -> Float[Tensor, "rows gen"]:
    """Of the generated tokens, within the support: `get_logprobs` without its host reads."""
    prefix_len = texts.samples.prefix_len
    logits = logits if support is None else support.restrict(logits, prefix_len)
    scores = generated_logits(logits, prefix_len).float() / texts.temperature
    written = texts.samples.tokens[:, prefix_len:, None]
    return scores.log_softmax(-1).gather(-1, written)[..., 0]


def _by_packed(policy: TransformerWithValueHead, texts: SampleRows) -> Float[Tensor, "2 rows gen"]:
    """Log-probs and values of the generated tokens in packed form."""
    samples, mask = texts.samples, texts.attention_mask
    stats, values = packed_token_stats(
        policy, samples.tokens, samples.prefix_len, texts.temperature, mask, samples.support
    )
    return torch.stack([stats.logprobs.float(), values.float()])


def _gap(found: Tensor, expected: Tensor, mask: Bool[Tensor, "..."]) -> Float[Tensor, ""]:
    """The largest difference at a real token; nan if one of two is not a number."""
    found, expected = found.float(), expected.float()
    difference = (found - expected).abs() / expected.abs().clamp(min=1)
    same = (found == expected) | (found.isnan() & expected.isnan()) | ~mask
    return difference.masked_fill(same, 0.0).max()


def _reference_gap(reference: HookedTransformer, texts: SampleRows) -> float:
    """The largest difference of a log-prob under the reference's two forms."""
    samples, mask = texts.samples, texts.attention_mask
    written = samples.tokens[:, samples.prefix_len :]
    residual = final_residuals(reference, samples.tokens, mask)
    expected = _logprobs(final_logits(reference, residual), texts)
    packed = packed_residuals(reference, samples.tokens, mask)[:, samples.prefix_len - 1 : -1]
    hidden = final_norm(reference, packed)[1]
    found = read_token_stats(reference, hidden, written, texts.temperature).logprobs
    return _gap(found, expected, samples.mask).item()


def _decoding_gap(policy: TransformerWithValueHead, texts: SampleRows) -> float:
    """The largest difference between decoding packed and decoding by modules, in the first tokens.

    Log-probabilities of the whole vocabulary are compared, and values.
    """
    samples, gaps = texts.samples, []
    written = samples.tokens[:, samples.prefix_len :][:, :DECODED]
    prompts, mask = samples.tokens[:, : samples.prefix_len], samples.prompt_mask
    packed = PackedDecoder(policy, prompts, mask, written.shape[1])
    decoders = packed, HookedDecoder(policy, prompts, mask)
    for step in range(written.shape[1]):
        if step:
            for decoder in decoders:
                decoder.feed(written[:, step - 1])
        real = samples.mask[:, step]
        (logits, values), (expected, expected_values) = ((d.state[:2]) for d in decoders)
        logprobs, expected = (x.float().log_softmax(-1) for x in (logits, expected))
        gaps += [_gap(logprobs, expected, real[:, None]), _gap(values, expected_values, real)]
    return torch.stack(gaps).max().item()


@torch.enable_grad()
def _gradient_gap(policy: TransformerWithValueHead, texts: SampleRows) -> float:
    """The largest difference of an entry of the gradient, as a share of the largest of them all.

    The gradient is that of a sum of all that is read, each token with a weight of its own.
    """
    parameters, mask = [p for p in policy.parameters() if p.requires_grad], texts.samples.mask
    weights = torch.linspace(0.5, 1.5, mask.numel(), device=mask.device).view(mask.shape) * mask
    found = []
    for form in (_by_packed, _by_modules):
        total = (form(policy, texts).masked_fill(~mask, 0.0) * weights).sum()
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
        found.append(torch.cat([gradient.flatten().float() for gradient in gradients]))
    packed, modules = found
    largest = modules.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((packed - modules).abs().max() / largest).item()
