"""Verifiable rewards in groups: pass@k, its estimate from samples, and groups with a signal."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def pass_at_k(p: Float[Tensor, " problem"], k: int) -> Float[Tensor, " problem"]:
    """Compute the probability that at least one of k independent responses is right.

    p is the probability that one response is right (pass@1). In float64, and accurate for the
    smallest p; not differentiable. Raises ValueError for a p outside [0, 1] or a k below 1.

    pass@k = 1 - (1 - p)^k
    """
    if k < 1 or k % 1:
        raise ValueError(f"k must be at least 1, got {k}. Pass an integer.")
    p = _check_probabilities(p)
    return -torch.expm1(k * torch.log1p(-p))


def pass_at_k_estimate(
    n_right: Int[Tensor, " problem"], n_samples: int, k: int
) -> Float[Tensor, " problem"]:
    """Estimate pass@k of each problem without bias, from its number of right responses.

    1. Consider all subsets of k of the n_samples responses to a problem.
    2. Count those without a right response: C(n - c, k) of C(n, k), as a product of fractions.
    3. The estimate is the fraction of the others. It is exactly 1 if fewer than k are wrong.

    In float64. The mean over problems estimates the pass@k of the set. 1 - (1 - c / n)^k would be
    too low. Raises ValueError unless 1 <= k <= n_samples, and for counts outside 0..n_samples.

    pass@k = 1 - C(n - c, k) / C(n, k)    (Chen et al. 2021, arXiv 2107.03374, equation 1)
    """
    if not 1 <= k <= n_samples:
        raise ValueError(f"k must be between 1 and n_samples={n_samples}, got {k}.")
    if ((n_right < 0) | (n_right > n_samples) | (n_right % 1 != 0)).any():
        raise ValueError(f"n_right must be counts of 0 to n_samples={n_samples}, got {n_right}.")
    wrong = (n_samples - n_right.detach().cpu()).double()
    drawn = torch.arange(k, dtype=torch.float64)
    all_wrong = (wrong[:, None] - drawn) / (n_samples - drawn)  # has a 0 if k > wrong
    return 1 - all_wrong.prod(-1)


def informative_fraction(
    p: Float[Tensor, " problem"], group_size: int
) -> Float[Tensor, " problem"]:
    """Compute the probability that the responses to a prompt are neither all right nor all wrong.

    Only such groups have different rewards, see `informative_groups`. In float64; not
    differentiable. Raises ValueError for a p outside [0, 1] or a group_size below 1.

    1 - p^m - (1 - p)^m, with m the group size
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}.")
    p = _check_probabilities(p)
    return pass_at_k(p, group_size) - p**group_size


def _check_probabilities(p: Float[Tensor, " problem"]) -> Float[Tensor, " problem"]:
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p must be between 0 and 1. Pass probabilities.")
    return p.detach().cpu().double()
