"""Per-token outputs of a policy on complete texts: log-probs, values, entropy, KL."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_lab.functional import check_result, generated_values, get_logprobs, log_probs
from rlhf_lab.models.device import autocast
from rlhf_lab.models.forward import Forward
from rlhf_lab.models.hooked_model import (
    HookedModel,
    TokenIds,
    TokenMask,
    final_residuals,
    has_hooks,
    unembed_residuals,
)
from rlhf_lab.models.lora import same_weights
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.token_stats import (
    GenResiduals,
    PerToken,
    StatsInputs,
    compute_token_stats,
    sampled_logprobs,
    stats_from_logits,
)
from rlhf_lab.models.value_head import (
    LogitsAndValues,
    TransformerWithValueHead,
    has_standard_forward,
)
from rlhf_lab.samples import Samples, Support

TOKENS_AT_ONCE = 8192  # tokens per forward pass in `compare_with_reference`, at least


@dataclass(frozen=True)
class PolicyOutputs:
    """Numbers of each sampled token that the objective needs; entropy and KL in nats."""

    logprobs: PerToken  # under the truncation with which it was sampled
    values: PerToken  # of the state before it
    entropy: PerToken  # of the policy, over the whole vocabulary
    kl: PerToken | None = None  # KL(policy || reference), over the whole vocabulary


def run_policy(
    policy: TransformerWithValueHead,
    tokens: TokenIds,
    prefix_len: int,
    temperature: float = 1.0,
    *,
    attention_mask: TokenMask | None = None,
    support: Support | None = None,
    reference: HookedModel | None = None,
    ref_residuals: GenResiduals | None = None,
    forward: Forward | None = None,
    logprobs: Callable[..., Tensor] = get_logprobs,
) -> PolicyOutputs:
    """Run the policy once over complete texts, with gradients.

    Args:
        tokens: prompt and response.
        prefix_len: number of prompt tokens per row, padding and BOS included.
        attention_mask: False on padding on the left of a prompt; None without padding.
        support: tokens that truncated sampling kept.
        ref_residuals: of the reference, at the states before the generated tokens.
        logprobs: custom `(logits, tokens, prefix_len, temperature)`, which gets the logits of the
            whole vocabulary, with -inf outside the support.
    """
    forward, states = forward or Forward(), slice(prefix_len - 1, -1)
    tokens, support = tokens.to(policy.device), support and support.to(policy.device)
    generated, is_custom = tokens[:, prefix_len:], logprobs is not get_logprobs
    inputs = StatsInputs(temperature, support, reference, ref_residuals, forward.dtype)
    if is_custom or not has_standard_forward(policy):
        logits, values = policy_outputs(policy, tokens, attention_mask, forward)
        stats = stats_from_logits(logits[:, states], generated, inputs)
        if is_custom:
            scored = logits if support is None else support.restrict(logits, prefix_len)
            custom = logprobs(scored, tokens, prefix_len, temperature)
            stats = stats._replace(logprobs=check_result("logprobs", custom, generated.shape))
    else:
        with forward.applied(policy):
            padded = attention_mask is not None
            _, hidden, values = run_left_padded(policy.states, tokens, attention_mask, padded)
        stats = compute_token_stats(policy.base_model, hidden[:, states], generated, inputs)
    values = generated_values(values, prefix_len)
    return PolicyOutputs(stats.logprobs, values, stats.entropy, stats.kl)


def policy_outputs(
    policy: TransformerWithValueHead,
    tokens: TokenIds,
    attention_mask: TokenMask | None = None,
    forward: Forward | None = None,
) -> LogitsAndValues:
    """Call the policy with the settings of a run: logits and values at every position."""
    with (forward or Forward()).applied(policy):
        return policy(tokens, attention_mask)


class ReferenceComparison(NamedTuple):
    """Difference of a policy from its reference at each generated token, in nats."""

    kl: PerToken  # KL(policy || reference), exact
    entropy: PerToken  # of the policy
    ref_residuals: GenResiduals  # at the states before the tokens


@torch.no_grad()
def compare_with_reference(
    policy: TransformerWithValueHead | HookedModel,
    reference: HookedModel,
    samples: Samples,
    temperature: float,
    chunk_size: int,
    forward: Forward | None = None,
) -> ReferenceComparison:
    """Compute exact KL and entropy at each generated token, and the reference's residuals.

    The policy's residuals are from the sampler. With hooks, or if the weights are equal, the
    policy runs again on the texts: then the KL of equal models is exactly 0.

    Args:
        chunk_size: number of sequences at a time, at least.
    """
    forward, model = forward or Forward(), policy
    samples = samples.to(next(policy.parameters()).device)
    if not isinstance(policy, HookedModel):
        model = policy.base_model if has_standard_forward(policy) else None
    is_stored = samples.residuals is not None and not has_hooks(policy)
    is_stored = is_stored and model is not None and not same_weights(model, reference)
    states, (batch, seq) = slice(samples.prefix_len - 1, -1), samples.tokens.shape
    chunks, chunk_size = [], max(chunk_size, TOKENS_AT_ONCE // seq)
    options = forward.dtype, samples.is_padded
    for rows in torch.arange(batch, device=samples.tokens.device).split(chunk_size):
        texts = samples.tokens[rows], samples.attention_mask[rows]
        ref_residual = final_residuals(reference, *texts, *options)[:, states].to(rows.device)
        inputs = StatsInputs(temperature, None, reference, ref_residual, forward.dtype)
        generated = samples.tokens[rows, samples.prefix_len :]
        if model is None:
            logits = policy_outputs(policy, *texts, forward)[0][:, states]
            stats = stats_from_logits(logits, generated, inputs)
        else:
            if is_stored:
                residual = samples.residuals[rows]
            else:
                residual = final_residuals(model, *texts, *options)[:, states]
            with autocast(residual.device, forward.dtype):
                hidden = model.ln_final(residual)
            stats = compute_token_stats(model, hidden, generated, inputs)
        chunks.append(ReferenceComparison(stats.kl, stats.entropy, ref_residual))
    return ReferenceComparison(*map(torch.cat, zip(*chunks, strict=True)))


@torch.no_grad()
def reference_logprobs(
    reference: HookedModel,
    samples: Samples,
    ref_residuals: GenResiduals,
    temperature: float,
    chunk_size: int,
    forward: Forward | None = None,
) -> PerToken:
    """Compute the reference's log-probabilities, renormalized over the tokens the policy kept."""
    chunks, generated = [], samples.tokens[:, samples.prefix_len :]
    dtype = None if forward is None else forward.dtype
    for rows in torch.arange(len(generated), device=generated.device).split(chunk_size):
        logprobs = log_probs(unembed_residuals(reference, ref_residuals[rows], dtype), temperature)
        support = None if samples.support is None else samples.support[rows]
        chunks.append(sampled_logprobs(logprobs, generated[rows], support))
    return torch.cat(chunks)
