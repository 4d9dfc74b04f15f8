"""Chunked token statistics: log-probs, entropy and KL from final residuals, without full logits."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models.fast.token_scan import Readout, Settings, TokenStatsFunction


class TokenStats(NamedTuple):
    """What the objective needs to know of each generated token, in nats.

    Args:
        logprobs: of the sampled tokens, within the support if there is one.
        entropy: of the policy, over the whole vocabulary.
        kl: KL(policy || reference), over the whole vocabulary; None without a reference.
    """

    logprobs: Float[Tensor, " rows"]
    entropy: Float[Tensor, " rows"]
    kl: Float[Tensor, " rows"] | None


def token_stats_chunked(
    policy: Readout,
    tokens: Int[Tensor, " rows"],
    reference: Readout | None = None,
    temperature: float = 1.0,
    support: tuple[Int[Tensor, "rows width"], Bool[Tensor, "rows width"]] | None = None,
    chunk_rows: int = 256,
    keep_bytes: int = 2**29,
) -> TokenStats:
    """Give what `get_logprobs`, `entropy_per_token` and `kl_per_token` give, by chunks of rows.

    1. Read out policy and reference, and take the log-softmax of both at the temperature.
    2. Pick the sampled token's entry, renormalised over `support` if there is one: token ids,
       distinct in a row, and which of them are kept. A token outside has log-probability -inf.
    3. Sum p log p and p (log p - log q) over the words with p > 0.
    4. Keep log p and log p - log q for the backward pass if they fit into `keep_bytes`; otherwise
       compute them there again, to the same bits.

    Gradients reach the policy's tensors, in their dtypes; the reference is a constant. A row whose
    upstream gradients are all 0 adds exactly 0, even if it holds nan or inf, so that a mask on the
    statistics is enough. Half-precision input is multiplied as it is and gives float32 results.
    There is no second derivative. Raises ValueError if shapes or dtypes disagree, or unless
    temperature > 0 and chunk_rows > 0.

    d log p(a)/dz = [a] - p,   dH/dz = -p (log p + H),   dKL/dz = p (log p - log q - KL)
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; give a temperature above 0.")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; give at least 1 row per chunk.")
    _check_readout("policy", policy, tokens, policy)
    learned, fixed = (policy.hidden, policy.W_U, policy.b_U), (None,) * 3
    if reference is not None:
        _check_readout("reference", reference, tokens, policy)
        fixed = (reference.hidden, reference.W_U, reference.b_U)
        fixed = tuple(None if x is None else x.detach() for x in fixed)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned)
    itemsize = at_least_float32(policy.hidden[:0]).element_size()
    log_bytes = len(tokens) * policy.W_U.shape[1] * itemsize * (1 if reference is None else 2)
    settings = Settings(temperature, chunk_rows, keep=learns and log_bytes <= keep_bytes)
    support = (None, None) if support is None else support
    return TokenStats(*TokenStatsFunction.apply(*learned, *fixed, tokens, *support, settings))


def _check_readout(
    name: str, readout: Readout, tokens: Int[Tensor, " rows"], policy: Readout
) -> None:
    """Refuse a readout that does not fit the tokens or the policy's vocabulary and dtype."""
    d_model, d_vocab = readout.hidden.shape[-1], policy.W_U.shape[-1]
    wanted = {"hidden": (len(tokens), d_model), "W_U": (d_model, d_vocab), "b_U": (d_vocab,)}
    for field, shape in wanted.items():
        x = getattr(readout, field)
        if x is not None and x.shape != shape:
            raise ValueError(
                f"{name}.{field} has shape {tuple(x.shape)} but must have {shape} here; give one "
                "row per token, and both models the same vocabulary."
            )
        if x is not None and x.dtype != policy.hidden.dtype:
            raise ValueError(
                f"{name}.{field} has dtype {x.dtype} but policy.hidden has {policy.hidden.dtype}; "
                "cast one to the other."
            )
