"""Packed read-out: from the final residual to logits, values and token statistics."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.models.device import total_memory
from rlhf_lab.models.fast.token_scan import Readout
from rlhf_lab.models.fast.token_stats import TokenStats, token_stats_chunked
from rlhf_lab.models.transformer_lens import HookedTransformer, is_centered
from rlhf_lab.models.value_head import TransformerWithValueHead
from rlhf_lab.samples import Support

LEAST_ROWS, LOGITS_AT_ONCE, BYTES_KEPT = 256, 2**22, 2**29
"""Of the read-out without a memory of its own: rows and logits per chunk, bytes for the backward
pass."""


def final_norm(
    model: HookedTransformer, residual: Float[Tensor, "*batch d_model"]
) -> tuple[Float[Tensor, "*batch d_model"], Float[Tensor, "*batch d_model"]]:
    """The final norm before its gain, which is `ln_final.hook_normalized`, and after it.

    The value head reads the first, the unembedding the second.
    """
    norm, shape = model.ln_final, (model.cfg.d_model,)
    if is_centered(norm):
        normalized = F.layer_norm(residual, shape, eps=norm.eps)
    else:
        normalized = F.rms_norm(residual, shape, eps=norm.eps)
    gained = normalized * norm.w if hasattr(norm, "w") else normalized
    return normalized, gained + norm.b if hasattr(norm, "b") else gained


def unembed(
    model: HookedTransformer,
    hidden: Float[Tensor, "*batch d_model"],
    W_U: Float[Tensor, "d_model d_vocab"] | None = None,
) -> Float[Tensor, "*batch d_vocab"]:
    """hidden @ W_U + b_U, without the copy of W_U that the hooked module makes at every call.

    `W_U` is the model's own when None, or the same in another dtype.
    """
    W_U = model.W_U if W_U is None else W_U
    return F.linear(hidden.to(W_U.dtype), W_U.T, model.b_U.to(W_U.dtype))


def read_state(
    policy: TransformerWithValueHead,
    residual: Float[Tensor, "batch seq d_model"],
    W_U: Float[Tensor, "d_model d_vocab"] | None = None,
) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
    """Logits and value estimates of last residuals: what the policy's forward does at its end."""
    normalized, hidden = final_norm(policy.base_model, residual)
    return unembed(policy.base_model, hidden, W_U), policy.value_head(normalized)[..., 0]


def read_token_stats(
    model: HookedTransformer,
    hidden: Float[Tensor, "batch gen d_model"],
    tokens: Int[Tensor, "batch gen"],
    temperature: float,
    support: Support | None = None,
    reference: HookedTransformer | None = None,
    ref_residuals: Float[Tensor, "batch gen d_model"] | None = None,
    dtype: torch.dtype | None = None,
) -> TokenStats:
    """Log-probability, entropy and exact KL of each generated token, in chunks of rows.

    `hidden` is the policy's, after the final norm, at the states before the tokens; `ref_residuals`
    are the reference's, before it. Without a reference there is no KL.
    """
    ref_readout = None
    if reference is not None:
        ref_readout = _readout(reference, final_norm(reference, ref_residuals)[1], dtype)
    stats = token_stats_chunked(
        _readout(model, hidden, dtype),
        tokens.flatten(),
        ref_readout,
        temperature,
        None if support is None else (support.tokens.flatten(0, 1), support.kept.flatten(0, 1)),
        *chunk_sizes(model.cfg.d_vocab, total_memory(hidden.device)),
    )
    return TokenStats(*(None if x is None else x.view(tokens.shape) for x in stats))


def chunk_sizes(d_vocab: int, memory: int | None) -> tuple[int, int]:
    """Rows per chunk of the read-out, and bytes of logarithms that are kept for the backward pass.

    A device with memory of its own gives a 256th of it to a chunk of logits (of which the read-out
    has about four at a time), and a 16th to what is kept. Both follow from the device alone, not
    from what is free, so that the same seed gives the same run.

    Args:
        memory: bytes that the device has; None on the CPU.
    """
    at_once, kept = LOGITS_AT_ONCE, BYTES_KEPT
    if memory is not None:
        float32 = 4
        at_once, kept = max(at_once, memory // 256 // float32), max(kept, memory // 16)
    return max(LEAST_ROWS, at_once // d_vocab), kept


def _readout(
    model: HookedTransformer, hidden: Float[Tensor, "batch gen d_model"], dtype: torch.dtype | None
) -> Readout:
    parts = (hidden.flatten(0, 1), model.W_U, model.b_U)
    return Readout(*(part.to(dtype or model.W_U.dtype) for part in parts))
