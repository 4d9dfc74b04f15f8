"""Outputs of a policy: log-probs, values, entropy, KL; the one fork between hooked and packed.

Each function runs the hooked modules and the readable functions, or, where `Forward` says so, the
packed form of `models/fast/`. Nothing else in the package decides between them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.functional import (
    entropy_per_token,
    generated_logits,
    generated_values,
    get_logprobs,
    kl_per_token,
)
from rlhf_lab.models.decode import HookedDecoder, is_plain
from rlhf_lab.models.device import autocast, product_dtype
from rlhf_lab.models.fast import (
    PackedDecoder,
    final_norm,
    packed_residuals,
    read_state,
    read_token_stats,
    runs_packed,
)
from rlhf_lab.models.hooks import has_hooks
from rlhf_lab.models.readout import read_out
from rlhf_lab.models.recompute import recomputing_blocks
from rlhf_lab.models.reference import final_residuals, same_weights
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.samples import Samples, Support

ForwardMode = Literal["auto", "hooked", "packed"]
TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Forward:
    """How a run goes through its models: packed or as hooked modules, and in which precision.

    Args:
        mode: "hooked" runs the modules; "auto" the packed form, where it is right for the model and
            passes every hook.
        dtype: of the matrix products; the models' own when None.
        recompute: keep only what goes from block to block for the backward pass, and run each
            block again there.
    """

    mode: ForwardMode = "auto"
    dtype: torch.dtype | None = None
    recompute: bool = False

    @classmethod
    def from_args(cls, args: RLHFArgs) -> "Forward":
        """How a run with these settings goes through its models."""
        return cls(dtype=product_dtype(args.precision), recompute=args.activation_checkpointing)

    def packs(self, *models: nn.Module) -> bool:
        """Whether all of these, policies or bare transformers, run packed as they are now."""
        if self.mode == "hooked":
            return False
        return all(
            runs_packed(model)
            if isinstance(model, HookedTransformer)
            else is_plain(model) and runs_packed(model.base_model)
            for model in models
        )


@dataclass(frozen=True)
class PolicyOutputs:
    """What the objective needs to know of the generated tokens.

    The hooked form gives logits, for the functions of `rlhf_lab.functional` to make entropy and KL
    of; the packed form gives entropy and KL of each token, and makes no logits.

    Args:
        logprobs: of the sampled tokens, under the truncation that sampled them.
        values: of the states before them.
        entropy: over the whole vocabulary, in nats per token.
        kl: KL(policy || reference) over the whole vocabulary, in nats per token, if a reference was
            given.
        logits, ref_logits: at the run's temperature, over the whole vocabulary; the second if a
            reference was given.
    """

    logprobs: Float[Tensor, "batch gen"]
    values: Float[Tensor, "batch gen"]
    entropy: Float[Tensor, "batch gen"] | None = None
    kl: Float[Tensor, "batch gen"] | None = None
    logits: Float[Tensor, "batch gen d_vocab"] | None = None
    ref_logits: Float[Tensor, "batch gen d_vocab"] | None = None


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
    want_logits: bool = False,
) -> PolicyOutputs:
    """Run the policy once over finished texts, with gradients.

    1. Take logits and values at the states before the generated tokens.
    2. Read the reference's logits out of its stored residuals, if there is one.
    3. Score the sampled tokens with the same temperature and truncation that sampled them.

    Args:
        tokens: prompt and response.
        prefix_len: prompt tokens per row, padding and BOS included.
        attention_mask: False on padding to the left of a prompt; None where there is none.
        support: the tokens that truncated sampling left, if it was on.
        reference: what the KL is taken from; no KL without one.
        ref_residuals: of the reference, at the states before the generated tokens.
        logprobs: `(logits, tokens, prefix_len, temperature)`.
        want_logits: give logits even where the models run packed. They are given anyway to a
            function of the caller's own for `logprobs`.
    """
    forward = forward or Forward()
    references = [] if reference is None else [reference]
    want_logits = want_logits or logprobs is not get_logprobs
    if forward.packs(policy, *references) and not want_logits:
        return _run_in_chunks(
            policy,
            tokens,
            prefix_len,
            temperature,
            attention_mask,
            support,
            reference,
            ref_residuals,
            forward,
        )
    logits, values = policy_outputs(policy, tokens, attention_mask, forward)
    scored = logits if support is None else support.restrict(logits, prefix_len)
    ref_logits = None
    if reference is not None:
        ref_logits = read_out(reference, ref_residuals) / temperature
    return PolicyOutputs(
        logprobs=logprobs(scored, tokens, prefix_len, temperature),
        values=generated_values(values, prefix_len),
        logits=generated_logits(logits, prefix_len) / temperature,
        ref_logits=ref_logits,
    )


def _run_in_chunks(
    policy: TransformerWithValueHead,
    tokens: Int[Tensor, "batch seq"],
    prefix_len: int,
    temperature: float,
    attention_mask: Bool[Tensor, "batch seq"] | None,
    support: Support | None,
    reference: HookedTransformer | None,
    ref_residuals: Float[Tensor, "batch gen d_model"] | None,
    forward: Forward,
) -> PolicyOutputs:
    """What `run_policy` leads to, in packed form and by chunks of rows, without its logits."""
    model = policy.base_model
    padded = attention_mask is not None
    settings = (attention_mask, forward.dtype, forward.recompute, padded)
    residual = packed_residuals(model, tokens, *settings)
    normalized, hidden = final_norm(model, residual[:, prefix_len - 1 : -1])
    stats = read_token_stats(
        model,
        reference,
        hidden,
        None if reference is None else ref_residuals,
        tokens[:, prefix_len:],
        temperature,
        None if support is None else (support.tokens, support.kept),
        forward.dtype,
    )
    return PolicyOutputs(
        logprobs=stats.logprobs,
        values=policy.value_head(normalized)[..., 0],
        entropy=stats.entropy,
        kl=stats.kl,
    )


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
    if not forward.packs(policy):
        recomputing = recomputing_blocks(policy, forward.recompute)
        with autocast(policy.device, forward.dtype), recomputing:
            return policy(tokens, attention_mask)
    model = policy.base_model
    residuals = packed_residuals(model, tokens, attention_mask, forward.dtype, forward.recompute)
    return read_state(policy, residuals, model.W_U.to(forward.dtype or model.W_U.dtype))


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
    model: HookedTransformer,
    reference: HookedTransformer,
    samples: Samples,
    temperature: float,
    chunk_size: int,
    forward: Forward | None = None,
) -> ReferenceComparison:
    """Exact KL and entropy of the policy at each generated token, and the reference's residuals.

    1. Run the reference over finished sequences, as far as the last residual.
    2. Take the policy's last residuals as the sampler noted them; while the policy still has the
       reference's weights, they are the reference's. Where a hook listens, which might change what
       it hears, run the policy on the same path. Either way equal weights give a KL of exactly 0.
    3. Keep the states before each generated token, and read out both logits.
    4. Take KL and entropy; keep the reference's residuals, which are far smaller than its logits.

    Args:
        chunk_size: sequences at a time; more, where little memory is needed for more.
    """
    forward = forward or Forward()
    packed, padded = forward.packs(model, reference), samples.is_padded
    noted = packed and not has_hooks(model)
    same = noted and not has_hooks(reference) and same_weights(model, reference)
    states = slice(samples.prefix_len - 1, -1)
    batch, seq = samples.tokens.shape
    chunk_size = max(chunk_size, TOKENS_AT_ONCE // seq) if packed else chunk_size
    found: list[ReferenceComparison] = []

    def last_residual(
        of: HookedTransformer, rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows gen d_model"]:
        tokens, mask = samples.tokens[rows], samples.attention_mask[rows]
        if packed:
            return packed_residuals(of, tokens, mask, forward.dtype, False, padded)[:, states]
        return final_residuals(of, tokens, mask, forward.dtype, padded)[:, states]

    for rows in torch.arange(batch, device=samples.tokens.device).split(chunk_size):
        ref_residual = last_residual(reference, rows)
        if same:
            residual = ref_residual
        elif noted and samples.residuals is not None:
            residual = samples.residuals[rows]
        else:
            residual = last_residual(model, rows)
        if packed:
            written = samples.tokens[rows][:, samples.prefix_len :]
            hidden = final_norm(model, residual)[1]
            stats = read_token_stats(
                model, reference, hidden, ref_residual, written, temperature, dtype=forward.dtype
            )
            found.append(ReferenceComparison(stats.kl, stats.entropy, ref_residual))
        else:
            logits = read_out(model, residual) / temperature
            kl = kl_per_token(logits, read_out(reference, ref_residual) / temperature)
            found.append(ReferenceComparison(kl, entropy_per_token(logits), ref_residual))
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
    packed = forward.packs(reference)
    written, support, found = samples.tokens[:, samples.prefix_len :], samples.support, []
    for rows in torch.arange(len(written), device=written.device).split(chunk_size):
        residual = ref_residuals[rows]
        kept = None if support is None else support[rows]
        if packed:
            hidden = final_norm(reference, residual)[1]
            pair = None if kept is None else (kept.tokens, kept.kept)
            stats = read_token_stats(
                reference, None, hidden, None, written[rows], temperature, pair, forward.dtype
            )
            found.append(stats.logprobs)
        else:
            logits = read_out(reference, residual)
            logits = torch.cat([logits, logits[:, -1:]], dim=1)
            scored = logits if kept is None else kept.restrict(logits, 1)
            tokens = torch.cat([written[rows][:, :1], written[rows]], dim=1)
            found.append(get_logprobs(scored, tokens, 1, temperature))
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
    as_modules = has_hooks(policy.base_model) and not bool(prompt_mask.all())
    if forward.packs(policy) and not as_modules:
        return PackedDecoder(policy, prompts, prompt_mask, gen_len, forward.dtype)
    return HookedDecoder(policy, prompts, prompt_mask, forward.dtype)
