"""Entropy of the policy's next-token distribution, and the entropy bonus."""

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import Denominator, masked_mean

__all__ = ["calc_entropy_bonus", "entropy_per_token"]


def entropy_per_token(logprobs: Float[Tensor, "batch gen d_vocab"]) -> Float[Tensor, "batch gen"]:
    """Compute the entropy of the next-token distribution at each generated token.

    1. Sum minus probability times log-probability over the vocabulary.

    `log_probs` computes `logprobs`. In nats per token, between 0 and log d_vocab.

    H(pi) = -sum_v pi(v) * log pi(v)
    """
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def calc_entropy_bonus(
    entropy: Float[Tensor, "batch gen"],
    ent_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average the entropy over the real generated tokens, times its coefficient.

    1. Average `entropy` (see `entropy_per_token`) over the real tokens.
    2. Multiply by `ent_coef`.

    The bonus is added to the objective. `denominator` as in `masked_mean`. Raises ValueError if
    the mask has another shape than `[batch gen]`.

    ent_coef * mean_t H(pi(. | s_t))   (Schulman et al. 2017, PPO, arXiv 1707.06347, equation 9)
    """
    return ent_coef * masked_mean(entropy, mask, denominator=denominator)
