"""Scaling of the rewards of a batch of sequences."""

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, masked_mean, masked_std


def normalize_reward(reward: Float[Tensor, " batch"], eps: float = 1e-5) -> Float[Tensor, " batch"]:
    """Shift and scale a batch of rewards to mean 0 and standard deviation 1.

    1. Turn half-precision rewards into float32.
    2. Measure from the first reward, so that equal rewards are exactly 0 whatever rounding does.
    3. Subtract the mean of the batch.
    4. Divide by the unbiased standard deviation plus `eps` (outside the root).

    A single reward, or equal rewards, become 0.0 (not nan).

    r' = (r - mean(r)) / (std(r) + eps)
    """
    reward = at_least_float32(reward)
    reward = reward - reward[:1]
    return (reward - masked_mean(reward)) / (masked_std(reward) + eps)
