"""KL divergence of the policy from the reference: exact, or estimated from sampled tokens."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.dispatch import call_by_name, check_result, look_up
from rlhf_lab.functional.logprobs import finite_logprobs
from rlhf_lab.functional.masks import at_least_float32, check_same_shape, zero_masked
from rlhf_lab.functional.moments import (
    Aggregation,
    Denominator,
    aggregate,
    masked_mean,
    sequence_sum,
)
from rlhf_lab.functional.policy_loss import policy_ratio

MAX_KL = 1e6  # nats; only a reference log-probability of LOG_ZERO gives more


def kl_per_token(
    logprobs: Float[Tensor, "batch gen d_vocab"], ref_logprobs: Float[Tensor, "batch gen d_vocab"]
) -> Float[Tensor, "batch gen"]:
    """Compute KL(policy || reference) at each generated token, exactly, over the whole vocabulary.

    1. Multiply each probability of the policy by the difference of log-probabilities, and sum.
    2. Set a KL above `MAX_KL` to inf, since the policy can produce a token the reference cannot.

    `log_probs` computes both arguments. The result is in nats per token. An infinite KL has
    gradient 0. Tokens to which the policy gives less than 1e-24 never make the KL infinite.

    KL(pi || pi_ref) = sum_v pi(v) * (log pi(v) - log pi_ref(v))
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    ref_logprobs = finite_logprobs(ref_logprobs)
    kl = (logprobs.exp() * finite_logprobs(logprobs - ref_logprobs)).sum(dim=-1)
    return kl.masked_fill(kl > MAX_KL, torch.inf)


def kl_per_sequence(
    kl: Float[Tensor, "batch gen"], mask: Bool[Tensor, "batch gen"] | None = None
) -> Float[Tensor, " batch"]:
    """Sum the KL of each sequence's real tokens: by the chain rule, nats of the whole response."""
    return sequence_sum(kl, mask)


def calc_kl_penalty(
    kl: Float[Tensor, "batch gen"],
    kl_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average the KL over the real generated tokens, times its coefficient.

    1. Average `kl` (see `kl_per_token`) over the real tokens.
    2. Multiply by `kl_coef`.

    The penalty is subtracted from the objective. `denominator` works as in `masked_mean`.

    kl_coef * mean_t KL(pi(. | s_t) || pi_ref(. | s_t))   (Ziegler et al. 2019, equation 2)
    """
    return kl_coef * masked_mean(kl, mask, denominator=denominator)


def kl_of_later_states(
    logprobs: Float[Tensor, "batch gen"],
    kl: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Weight each token's log-probability with the KL at the states after it.

    1. For each token, add up the KL of the tokens after it in its sequence, without its own.
    2. Multiply by the token's log-probability. `kl` counts as a number: no gradient reaches it.

    Summed over each sequence and averaged over sequences, its gradient is the second term below,
    for tokens that the policy sampled; `calc_kl_penalty` has the first.

    grad E[sum_t KL_t] = E[sum_t grad KL_t] + E[sum_t grad log pi(a_t | s_t) sum_{t' > t} KL_{t'}]
    """
    check_same_shape(logprobs=logprobs, kl=kl, mask=mask)
    kl = zero_masked(at_least_float32(kl), mask).detach()
    later = kl.sum(dim=1, keepdim=True) - kl.cumsum(dim=1)
    return zero_masked(at_least_float32(logprobs), mask) * later


def kl_estimate(
    logprobs: Float[Tensor, "batch gen"],
    ref_logprobs: Float[Tensor, "batch gen"],
    kind: str | Callable[..., Tensor],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Estimate the KL at each token from the sampled token's log-probabilities.

    1. Put 0 at masked tokens, and take d = log pi - log pi_ref.
    2. k1 = d is unbiased, but has a high variance and can be negative.
    3. k2 = d^2 / 2 is biased, with a low variance.
    4. k3 = exp(-d) - 1 + d is never negative. It is unbiased if the policy can produce every token
       that the reference can; with top-k sampling it is too small. It overflows to inf if the
       reference's probability is more than e^88 times the policy's.

    In nats per token. The estimates are unbiased if the tokens were sampled from the policy whose
    log-probabilities come first. To measure how far a policy has moved since it sampled, KL(old ||
    new), pass the old log-probabilities first. `kind` can also be another name from
    `KL_ESTIMATORS`, or a function of any of `logprobs`, `ref_logprobs` and `mask`.

    Source: Schulman, "Approximating KL Divergence", 2020 (with r = pi_ref / pi = exp(-d)).
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    logprobs, ref_logprobs = zero_masked(logprobs, mask), zero_masked(ref_logprobs, mask)
    log_ratio = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    return _other_estimate(logprobs, ref_logprobs, kind, mask)


def kl_absolute(
    logprobs: Float[Tensor, "batch gen"], ref_logprobs: Float[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Compute |log pi - log pi_ref| per token, in nats: TRL's "abs", not an estimate of the KL."""
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (at_least_float32(logprobs) - at_least_float32(ref_logprobs)).abs()


def kl_straight_through(
    logprobs: Float[Tensor, "batch gen"], ref_logprobs: Float[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Combine the value of k3 with the gradient of k2, which is the gradient of the KL.

    k3 with gradient d * grad log pi   (Schulman 2020; Tang and Munos 2025, arXiv 2506.09477)
    """
    value = kl_estimate(logprobs, ref_logprobs, "k3").detach()
    carrier = kl_estimate(logprobs, ref_logprobs, "k2")
    return value + (carrier - carrier.detach())


def kl_importance_weighted(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    ref_logprobs: Float[Tensor, "batch gen"],
) -> Float[Tensor, "batch gen"]:
    """Estimate the KL of each token that an older policy sampled, unbiased in value and gradient.

    (pi / pi_old) * (log pi - log pi_ref)
    """
    return policy_ratio(logprobs, old_logprobs) * kl_estimate(logprobs, ref_logprobs, "k1")


def calc_sampled_kl_penalty(
    logprobs: Float[Tensor, "batch gen"],
    ref_logprobs: Float[Tensor, "batch gen"],
    kind: str | Callable[..., Tensor],
    kl_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    *,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average a `kl_estimate` over the batch (see `aggregate`), times its coefficient."""
    kl = kl_estimate(logprobs, ref_logprobs, kind, mask)
    return kl_coef * aggregate(kl, mask, aggregation, denominator)


# KL estimators by name: the values of the setting `kl_estimator`
KL_ESTIMATORS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "k1": functools.partial(kl_estimate, kind="k1"),
        "k2": functools.partial(kl_estimate, kind="k2"),
        "k3": functools.partial(kl_estimate, kind="k3"),
        "abs": kl_absolute,
        "mse": functools.partial(kl_estimate, kind="k2"),  # TRL's name for k2
        "k3_straight_through": kl_straight_through,
    }
)


def _other_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str | Callable[..., Tensor], mask: Tensor | None
) -> Tensor:
    function = look_up(kind, KL_ESTIMATORS, "kl_estimator")
    available = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask}
    estimate = call_by_name(function, available, "kl_estimator", ("logprobs", "ref_logprobs"))
    return zero_masked(check_result("kl_estimator", estimate, logprobs.shape), mask)
