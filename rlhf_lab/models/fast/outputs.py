"""Packed forms of the outputs of `models/outputs.py`, read by chunks of rows."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.models.fast.blocks import packed_residuals
from rlhf_lab.models.fast.readout import final_norm, read_token_stats
from rlhf_lab.models.fast.token_stats import TokenStats
from rlhf_lab.models.hooks import has_hooks
from rlhf_lab.models.recompute import NO_UNITS
from rlhf_lab.models.reference import same_weights
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.samples import Samples, Support

TOKENS_AT_ONCE = 8192


def packed_token_stats(
    policy: TransformerWithValueHead,
    tokens: Int[Tensor, "batch seq"],
    prefix_len: int,
    temperature: float,
    attention_mask: Bool[Tensor, "batch seq"] | None,
    support: Support | None,
    reference: HookedTransformer | None = None,
    ref_residuals: Float[Tensor, "batch gen d_model"] | None = None,
    dtype: torch.dtype | None = None,
    recompute: bool = False,
    units: Mapping[nn.Module, nn.Module] = NO_UNITS,
) -> tuple[TokenStats, Float[Tensor, "batch gen"]]:
    """Statistics of each generated token, and values, without the logits; see `run_policy`."""
    model, padded = policy.base_model, attention_mask is not None
    residual = packed_residuals(model, tokens, attention_mask, dtype, recompute, padded, units)
    normalized, hidden = final_norm(model, residual[:, prefix_len - 1 : -1])
    written = tokens[:, prefix_len:]
    stats = read_token_stats(
        model, hidden, written, temperature, support, reference, ref_residuals, dtype
    )
    return stats, policy.value_head(normalized)[..., 0]


def packed_comparison(
    model: HookedTransformer,
    reference: HookedTransformer,
    samples: Samples,
    temperature: float,
    chunk_size: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """KL, entropy and the reference's residuals; see `compare_with_reference`.

    The policy's last residuals are those that the sampler noted; while the policy still has the
    reference's weights, they are the reference's. Where a hook listens, which might change what it
    hears, the policy runs on the same path. Either way equal weights give a KL of exactly 0.
    """
    noted = not has_hooks(model)
    same = noted and not has_hooks(reference) and same_weights(model, reference)
    states, padded = slice(samples.prefix_len - 1, -1), samples.is_padded
    batch, seq = samples.tokens.shape
    found: list[tuple[Tensor, ...]] = []
    chunk_size = max(chunk_size, TOKENS_AT_ONCE // seq)
    for rows in torch.arange(batch, device=samples.tokens.device).split(chunk_size):
        texts = samples.tokens[rows], samples.attention_mask[rows], dtype, False, padded
        ref_residual = packed_residuals(reference, *texts)[:, states]
        if same:
            residual = ref_residual
        elif noted and samples.residuals is not None:
            residual = samples.residuals[rows]
        else:
            residual = packed_residuals(model, *texts)[:, states]
        written = samples.tokens[rows][:, samples.prefix_len :]
        hidden = final_norm(model, residual)[1]
        stats = read_token_stats(
            model, hidden, written, temperature, None, reference, ref_residual, dtype
        )
        found.append((stats.kl, stats.entropy, ref_residual))
    return tuple(map(torch.cat, zip(*found, strict=True)))
