"""Entropy of the policy's next-token distribution, and the entropy bonus."""

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import Denominator, at_least_float32, masked_mean, zero_masked

__all__ = ["calc_entropy_bonus", "entropy_per_token"]


def entropy_per_token(logits: Float[Tensor, "batch gen d_vocab"]) -> Float[Tensor, "batch gen"]:
    """Compute the entropy of the next-token distribution at each generated token.

    1. Take the log-softmax.
    2. Keep the tokens with positive probability, since 0 * log 0 is 0.
    3. Sum minus probability times log-probability over the vocabulary.

    In nats per token, between 0 and log d_vocab. Filtered tokens (logit -inf) are allowed.
    Half-precision input gives a float32 result.

    H(pi) = -sum_v pi(v) * log pi(v)
    """
    logprobs = at_least_float32(logits).log_softmax(dim=-1)
    possible = logprobs.exp() > 0
    logprobs = zero_masked(logprobs, possible)
    return -zero_masked(logprobs.exp() * logprobs, possible).sum(dim=-1)


def calc_entropy_bonus(
    logits: Float[Tensor, "batch gen d_vocab"],
    ent_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average the entropy over the real generated tokens, times its coefficient.

    1. Blank the logits at masked tokens.
    2. Take the entropy at each generated token.
    3. Average over the real tokens, and multiply by `ent_coef`.

    The bonus is added to the objective. `denominator` as in `masked_mean`. Raises ValueError if
    the mask has another shape than `[batch gen]`.

    ent_coef * mean_t H(pi(. | s_t))   (Schulman et al. 2017, PPO, arXiv 1707.06347, equation 9)
    """
    entropy = entropy_per_token(zero_masked(logits, mask))
    return ent_coef * masked_mean(entropy, mask, denominator=denominator)
