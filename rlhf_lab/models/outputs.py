"""Outputs of a policy: log-probs, values, entropy, KL; the one fork between hooked and packed.

Each function runs the hooked modules and the readable functions, or, where `Forward.packs` says so,
the packed form of `models/fast/`. What it says is decided in `models/forward.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional import (
    entropy_per_token,
    generated_logits,
    generated_values,
    get_logprobs,
    kl_per_token,
    log_probs,
    token_logprobs,
)
from rlhf_lab.models.decode import HookedDecoder
from rlhf_lab.models.device import autocast
from rlhf_lab.models.fast.blocks import packed_residuals
from rlhf_lab.models.fast.decoder import PackedDecoder
from rlhf_lab.models.fast.outputs import packed_comparison, packed_token_stats
from rlhf_lab.models.fast.readout import final_norm, read_state, read_token_stats, unembed
from rlhf_lab.models.fast.static_decoder import StaticDecoder, cuda_graph
from rlhf_lab.models.forward import Forward, transformer_of, why_not_read
from rlhf_lab.models.hooks import has_hooks
from rlhf_lab.models.recompute import recomputing_blocks
from rlhf_lab.models.reference import final_residuals
from rlhf_lab.models.transformer_lens import HookedTransformer, final_logits
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.samples import Samples, Support

PADDED = "while decoding, hooks are to see the padding of unequal prompts on the left"
"""Why the modules decode, where the packed form would run but for the padding."""


@dataclass(frozen=True)
class PolicyOutputs:
    """Per-token numbers that the objective needs.

    Args:
        logprobs: of the sampled tokens, under the truncation that sampled them.
        values: of the states before them.
        entropy: over the whole vocabulary, in nats per token.
        kl: KL(policy || reference) over the whole vocabulary, in nats per token, if a reference was
            given.
    """

    logprobs: Float[Tensor, "batch gen"]
    values: Float[Tensor, "batch gen"]
    entropy: Float[Tensor, "batch gen"]
    kl: Float[Tensor, "batch gen"] | None = None


def run_policy(
    policy: TransformerWithValueHead,
    tokens: Int[Tensor, "batch seq"],
    prefix_len: int,
    temperature: float = 1.0,
    *,
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
    support: Support | None = None,
    reference: HookedTransformer | None = None,
    ref_residuals: Float[Tensor, "batch gen d_model"] | None = None,
    forward: Forward | None = None,
    logprobs: Callable[..., Tensor] = get_logprobs,
) -> PolicyOutputs:
    """Run the policy once over finished texts, with gradients.

    1. Take logits and values at the states before the generated tokens, and log-probabilities of
       the whole vocabulary once, for all per-token numbers.
    2. Compute the KL from the reference's stored residuals, if a reference is given.
    3. Score the sampled tokens with the same temperature and truncation that sampled them.

    Args:
        tokens: prompt and response.
        prefix_len: prompt tokens per row, padding and BOS included.
        attention_mask: False on padding to the left of a prompt; None where there is none.
        support: the tokens that truncated sampling left, if it was on.
        ref_residuals: of the reference, at the states before the generated tokens.
        logprobs: `(logits, tokens, prefix_len, temperature)`. A custom function gets the logits of
            the whole vocabulary, with -inf outside the support.
    """
    forward = forward or Forward()
    is_custom = logprobs is not get_logprobs
    models = (policy,) if reference is None else (policy, reference)
    if not is_custom and forward.packs(*models):
        stats, values = packed_token_stats(
            policy,
            tokens,
            prefix_len,
            temperature,
            attention_mask,
            support,
            reference,
            ref_residuals,
            forward.dtype,
            forward.recompute,
            forward.units,
        )
        return PolicyOutputs(stats.logprobs, values, stats.entropy, stats.kl)
    logits, values = policy_outputs(policy, tokens, attention_mask, forward)
    full_logprobs, kl = log_probs(generated_logits(logits, prefix_len), temperature), None
    if reference is not None:
        ref_logits = read_out(reference, ref_residuals, forward)
        kl = kl_per_token(full_logprobs, log_probs(ref_logits, temperature))
    if is_custom:
        scored = logits if support is None else support.restrict(logits, prefix_len)
        sampled = logprobs(scored, tokens, prefix_len, temperature)
    else:
        sampled = _sampled_logprobs(full_logprobs, tokens[:, prefix_len:], support)
    values = generated_values(values, prefix_len)
    return PolicyOutputs(sampled, values, entropy_per_token(full_logprobs), kl)


def _sampled_logprobs(full_logprobs: Tensor, tokens: Tensor, support: Support | None) -> Tensor:
    if support is None:
        return token_logprobs(full_logprobs, tokens)
    return support.token_logprobs(full_logprobs, tokens)


def policy_outputs(
    policy: TransformerWithValueHead,
    tokens: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
    forward: Forward | None = None,
) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
    """Logits and values at every position: what calling the policy gives.

    Raises:
        ConfigError: `forward.recompute`, and a hook within a block, which would fire twice.
    """
    forward = forward or Forward()
    if forward.packs(policy):
        model, dtype, recompute = policy.base_model, forward.dtype, forward.recompute
        within = dict(recompute=recompute, units=forward.units)
        residuals = packed_residuals(model, tokens, attention_mask, dtype, **within)
        return read_state(policy, residuals, model.W_U.to(dtype or model.W_U.dtype))
    recomputing = recomputing_blocks(policy, forward.recompute, forward.units)
    with autocast(policy.device, forward.dtype), recomputing:
        return policy(tokens, attention_mask)


def read_out(
    model: HookedTransformer,
    residuals: Float[Tensor, "batch gen d_model"],
    forward: Forward | None = None,
) -> Float[Tensor, "batch gen d_vocab"]:
    """Logits of the residuals that `final_residuals` gave."""
    forward = forward or Forward("hooked")
    if forward.reads_fast(model):
        return unembed(model, final_norm(model, residuals)[1])
    with autocast(residuals.device, forward.dtype):
        return final_logits(model, residuals)


class ReferenceComparison(NamedTuple):
    """How far a policy is from its reference at each generated token.

    Args:
        kl: KL(policy || reference), exact, in nats per token.
        entropy: of the policy, in nats per token.
        ref_residuals: the reference's last residual at the states before the tokens.
    """

    kl: Float[Tensor, "batch gen"]
    entropy: Float[Tensor, "batch gen"]
    ref_residuals: Float[Tensor, "batch gen d_model"]


@torch.no_grad()
def compare_with_reference(
    policy: TransformerWithValueHead | HookedTransformer,
    reference: HookedTransformer,
    samples: Samples,
    temperature: float,
    chunk_size: int,
    forward: Forward | None = None,
) -> ReferenceComparison:
    """Exact KL and entropy of the policy at each generated token, and the reference's residuals.

    1. Run the reference over finished sequences, as far as the last residual, and the policy on the
       same path, so that equal weights give a KL of exactly 0.
    2. Keep the states before each generated token, and read out both logits.
    3. Take KL and entropy; keep the reference's residuals, which are far smaller than its logits.

    Args:
        policy: or its transformer alone.
        chunk_size: sequences at a time; more, where little memory is needed for more.
    """
    forward = forward or Forward()
    model = transformer_of(policy)
    if model is not None and forward.packs(model, reference):
        return ReferenceComparison(
            *packed_comparison(model, reference, samples, temperature, chunk_size, forward.dtype)
        )
    # each token is drawn in the state before it; behind the last one nothing is drawn
    states, found = slice(samples.prefix_len - 1, -1), []
    for rows in torch.arange(len(samples.tokens), device=samples.tokens.device).split(chunk_size):
        texts = samples.tokens[rows], samples.attention_mask[rows]
        settings = forward.dtype, samples.is_padded
        ref_residual = final_residuals(reference, *texts, *settings)[:, states]
        ref_logprobs = log_probs(read_out(reference, ref_residual, forward), temperature)
        if model is None:
            logits = policy_outputs(policy, *texts, forward)[0][:, states]
        else:
            residual = final_residuals(model, *texts, *settings)[:, states]
            logits = read_out(model, residual, forward)
        logprobs = log_probs(logits, temperature)
        kl, entropy = kl_per_token(logprobs, ref_logprobs), entropy_per_token(logprobs)
        found.append(ReferenceComparison(kl, entropy, ref_residual))
    return ReferenceComparison(*map(torch.cat, zip(*found, strict=True)))


@torch.no_grad()
def reference_logprobs(
    reference: HookedTransformer,
    samples: Samples,
    ref_residuals: Float[Tensor, "batch gen d_model"],
    temperature: float,
    chunk_size: int,
    forward: Forward | None = None,
) -> Float[Tensor, "batch gen"]:
    """Log-probability of each generated token under the reference, as the policy's is taken.

    1. Read out the reference's residuals at the same temperature.
    2. Where sampling was truncated, renormalise over the tokens that the policy kept, so that both
       log-probabilities are of distributions over the same tokens.

    Args:
        ref_residuals, chunk_size: see `compare_with_reference`.
    """
    forward = forward or Forward()
    packed, found = forward.packs(reference), []
    written = samples.tokens[:, samples.prefix_len :]
    for rows in torch.arange(len(written), device=written.device).split(chunk_size):
        tokens, residual = written[rows], ref_residuals[rows]
        support = None if samples.support is None else samples.support[rows]
        if packed:
            hidden = final_norm(reference, residual)[1]
            stats = read_token_stats(
                reference, hidden, tokens, temperature, support, dtype=forward.dtype
            )
            found.append(stats.logprobs)
            continue
        full_logprobs = log_probs(read_out(reference, residual, forward), temperature)
        found.append(_sampled_logprobs(full_logprobs, tokens, support))
    return torch.cat(found)


def start_decoding(
    policy: TransformerWithValueHead,
    prompts: Int[Tensor, "batch prefix"],
    prompt_mask: Bool[Tensor, "batch prefix"],
    gen_len: int,
    forward: Forward | None = None,
) -> HookedDecoder | PackedDecoder:
    """Read left-padded prompts, and go on one token at a time.

    Hooks see prompts of unequal lengths with their padding on the left, which is where the hooked
    modules have it and the packed form does not.
    """
    forward = forward or Forward()
    padded = has_hooks(policy.base_model) and not bool(prompt_mask.all())
    if forward.packs(policy, also=PADDED if padded else None):
        texts = policy, prompts, prompt_mask, gen_len, forward.dtype
        on_cuda = policy.device.type == "cuda"
        return StaticDecoder(*texts, capture=cuda_graph) if on_cuda else PackedDecoder(*texts)
    reads_fast = why_not_read(policy) is None and forward.reads_fast(policy.base_model)
    read = partial(read_state, policy) if reads_fast else None
    return HookedDecoder(policy, prompts, prompt_mask, forward.dtype, read)
