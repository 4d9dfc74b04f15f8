"""Log-probabilities of generated tokens, and the logits and values that belong to them."""

import torch
from eindex import eindex
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlhf_lab.functional.masks import at_least_float32, check_same_shape

__all__ = [
    "LOG_ZERO",
    "generated_logits",
    "generated_values",
    "get_logprobs",
    "get_max_logprobs",
    "log_probs",
    "token_logprobs",
]

LOG_ZERO = -1e30
"""Value of log 0: 0 * LOG_ZERO is 0, but 0 * -inf would be nan."""


def log_probs(
    logits: Float[Tensor, "batch gen d_vocab"], temperature: float = 1.0
) -> Float[Tensor, "batch gen d_vocab"]:
    """Compute the log-probability of every token of the vocabulary.

    1. Divide the logits by the temperature.
    2. Clamp them to at least `LOG_ZERO` and at most -`LOG_ZERO`.
    3. Take the log-softmax over the vocabulary.

    A filtered token (logit -inf) gets `LOG_ZERO`, whose exponential is 0. All results and gradients
    are finite unless a logit is nan. Half-precision logits give a float32 result. Raises ValueError
    unless temperature > 0.

    log pi(v | s) = z[v] / T - log sum_u exp(z[u] / T)
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be greater than 0, got {temperature!r}.")
    logits = at_least_float32(logits)
    scaled = logits if temperature == 1 else logits / temperature
    return scaled.clamp(LOG_ZERO, -LOG_ZERO).log_softmax(dim=-1)


def token_logprobs(
    logprobs: Float[Tensor, "batch gen d_vocab"], tokens: Int[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Select the log-probability of each generated token from those of the whole vocabulary.

    Raises ValueError unless `tokens` has the shape `[batch gen]` of `logprobs`.
    """
    check_same_shape(logprobs.shape[:-1], tokens=tokens)
    return logprobs.gather(-1, tokens[..., None])[..., 0]


def get_logprobs(
    logits: Float[Tensor, "batch seq d_vocab"],
    tokens: Int[Tensor, "batch seq"],
    prefix_len: int | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "batch gen"]:
    """Give the log-probability of each generated token under the logits that predicted it.

    1. Keep logits and tokens from position `prefix_len - 1` on, the state before the first
       generated token. Without a `prefix_len`, every token after the first counts as generated.
    2. Divide the logits by the temperature, and take the log-softmax over the vocabulary.
    3. For each position s, pick the entry of the token at s + 1.

    The result is in nats, with gen = seq - prefix_len columns; half-precision logits are turned
    into float32 first. Raises ValueError unless 1 <= prefix_len < seq and temperature > 0.

    log pi(a_t | s_t) = z[a_t] / T - log sum_v exp(z[v] / T), z the logits at prefix_len - 1 + t
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; give a temperature above 0.")
    start = _state_before_generation(1 if prefix_len is None else prefix_len, logits.shape[1])
    logits, tokens = logits[:, start:], tokens[:, start:]
    logprobs = (at_least_float32(logits) / temperature).log_softmax(dim=-1)
    with _ListIndexAsTuple():
        return eindex(logprobs, tokens, "b s [b s+1]")


def get_max_logprobs(
    logits: Float[Tensor, "batch seq d_vocab"],
    prefix_len: int | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "batch gen"]:
    """Give the log-probability of the likeliest token wherever a token was generated.

    1. Keep logits from position `prefix_len - 1` on but the last, as `get_logprobs` does.
    2. Divide them by the temperature, and take the largest log-softmax over the vocabulary.

    In nats: 0 where the policy is certain, -log d_vocab where all tokens are alike; never below
    `get_logprobs` of any token. Where two are likeliest, the gradient goes to one of them. Raises
    ValueError as `get_logprobs` does.

    max_v log pi(v | s_t) = (max_v z[v]) / T - log sum_v exp(z[v] / T)
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; give a temperature above 0.")
    kept = generated_logits(logits, 1 if prefix_len is None else prefix_len)
    return (at_least_float32(kept) / temperature).log_softmax(dim=-1).max(dim=-1).values


def generated_values(
    values: Float[Tensor, "batch seq"], prefix_len: int
) -> Float[Tensor, "batch gen"]:
    """Keep the value of the state before each generated token.

    1. Drop the positions before `prefix_len - 1`, along the sequence axis.
    2. Drop the last position, after which nothing is generated.

    Raises ValueError unless 1 <= prefix_len < seq.
    """
    return values[:, _state_before_generation(prefix_len, values.shape[1]) : -1]


def generated_logits(
    logits: Float[Tensor, "batch seq d_vocab"], prefix_len: int
) -> Float[Tensor, "batch gen d_vocab"]:
    """Keep the logits that each generated token was drawn from.

    1. Drop the positions before `prefix_len - 1`, along the sequence axis.
    2. Drop the last position, whose logits predict a token that is not there.

    Raises ValueError unless 1 <= prefix_len < seq.
    """
    return logits[:, _state_before_generation(prefix_len, logits.shape[1]) : -1]


def _state_before_generation(prefix_len: int, seq: int) -> int:
    """Return the position of the state before the first generated token, or refuse."""
    if not 1 <= prefix_len < seq:
        raise ValueError(
            f"prefix_len is {prefix_len} but the sequences have {seq} tokens; give a prefix_len of "
            "at least 1 (the BOS token) that leaves at least one generated token."
        )
    # the first generated token stands at prefix_len, and is drawn in the state before it
    return prefix_len - 1


class _ListIndexAsTuple(TorchFunctionMode):
    """Reads x[[i, j]] as x[i, j], as eindex means it, so that torch has nothing to warn about.

    The mode belongs to the thread that enters it, and leaves the warning filters alone.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and isinstance(args[1], list):
            args = (args[0], tuple(args[1]))
        return func(*args, **(kwargs or {}))
