"""Log-probabilities and entropy of generated tokens, and the logits and values before them."""

import torch
from eindex import eindex
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlhf_lab.functional.masks import at_least_float32, check_same_shape
from rlhf_lab.functional.moments import Denominator, masked_mean

LOG_ZERO = -1e30  # value of log 0: 0 * LOG_ZERO is 0, but 0 * -inf would be nan


def log_probs(
    logits: Float[Tensor, "batch gen d_vocab"], temperature: float = 1.0
) -> Float[Tensor, "batch gen d_vocab"]:
    """Compute the log-probability of every token of the vocabulary.

    A filtered token (logit -inf) gets `LOG_ZERO`, whose exponential is 0. All results and gradients
    are finite unless a logit is nan. Raises ValueError unless temperature > 0.

    log pi(v | s) = z[v] / T - log sum_u exp(z[u] / T)
    """
    _check_temperature(temperature)
    logits = at_least_float32(logits)
    scaled = logits if temperature == 1 else logits / temperature
    return scaled.clamp(LOG_ZERO, -LOG_ZERO).log_softmax(dim=-1)


def finite_logprobs(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Replace -inf by `LOG_ZERO`, which half precision cannot represent: it becomes float32."""
    return at_least_float32(x).clamp(min=LOG_ZERO)


def token_logprobs(
    logprobs: Float[Tensor, "batch gen d_vocab"], tokens: Int[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Select the log-probability of each generated token from those of the whole vocabulary."""
    check_same_shape(logprobs.shape[:-1], tokens=tokens)
    return logprobs.gather(-1, tokens[..., None])[..., 0]


def get_logprobs(
    logits: Float[Tensor, "batch seq d_vocab"],
    tokens: Int[Tensor, "batch seq"],
    prefix_len: int | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "batch gen"]:
    """Compute the log-probability of each generated token under the logits that predicted it.

    1. Keep logits and tokens from position `prefix_len - 1`, the state before the first generated
       token, to the end. Without a `prefix_len`, every token after the first counts as generated.
    2. Divide the logits by the temperature, and take the log-softmax over the vocabulary.
    3. For each position s, pick the entry of the token at s + 1.

    The result is in nats, with gen = seq - prefix_len columns. Raises ValueError unless
    1 <= prefix_len < seq, temperature > 0, and token ids are at least 0.

    log pi(a_t | s_t) = z[a_t] / T - log sum_v exp(z[v] / T), z the logits at prefix_len - 1 + t
    """
    _check_temperature(temperature)
    check_same_shape(logits.shape[:-1], tokens=tokens)
    check_token_ids(tokens)
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
    """Compute the log-probability of the most likely token at each generated position.

    In nats. Arguments and errors as in `get_logprobs`.

    max_v log pi(v | s_t) = (max_v z[v]) / T - log sum_v exp(z[v] / T)
    """
    _check_temperature(temperature)
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
    """Keep the logits that each generated token was drawn from; errors as `generated_values`."""
    return logits[:, _state_before_generation(prefix_len, logits.shape[1]) : -1]


def entropy_per_token(logprobs: Float[Tensor, "batch gen d_vocab"]) -> Float[Tensor, "batch gen"]:
    """Compute the entropy of the next-token distribution at each generated token.

    `log_probs` computes `logprobs`. In nats per token, between 0 and log d_vocab.

    H(pi) = -sum_v pi(v) * log pi(v)
    """
    return -(logprobs.exp() * finite_logprobs(logprobs)).sum(dim=-1)


def calc_entropy_bonus(
    entropy: Float[Tensor, "batch gen"],
    ent_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average the entropy over the real generated tokens, times its coefficient.

    1. Average `entropy` (see `entropy_per_token`) over the real tokens.
    2. Multiply by `ent_coef`.

    The bonus is added to the objective. `denominator` as in `masked_mean`.

    ent_coef * mean_t H(pi(. | s_t))   (Schulman et al. 2017, PPO, arXiv 1707.06347, equation 9)
    """
    return ent_coef * masked_mean(entropy, mask, denominator=denominator)


def check_token_ids(tokens: Int[Tensor, "*shape"]) -> None:
    """Raise ValueError if a token id is negative; torch would read entry -1 as the last one.

    On CUDA an asynchronous assertion, so that the host does not wait.
    """
    message = "Token ids must be at least 0, got a negative one. Replace it with the pad token."
    if tokens.is_cuda:
        torch._assert_async((tokens >= 0).all(), message)
    elif tokens.device.type == "cpu" and (tokens < 0).any():
        raise ValueError(message)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be greater than 0, got {temperature!r}.")


def _state_before_generation(prefix_len: int, seq: int) -> int:
    if not 1 <= prefix_len < seq:
        raise ValueError(
            f"prefix_len is {prefix_len} but the sequences have {seq} tokens. Set a prefix_len of "
            "at least 1 (the BOS token) that leaves at least one generated token."
        )
    return prefix_len - 1  # the first generated token is at prefix_len, drawn one state earlier


class _ListIndexAsTuple(TorchFunctionMode):
    """Index x[[i, j]], as eindex writes it, as x[i, j], without torch's warning."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and isinstance(args[1], list):
            args = (args[0], tuple(args[1]))
        return func(*args, **(kwargs or {}))
