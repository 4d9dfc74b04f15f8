"""Running mean and variance (Chan et al. 1983), merged over batches and ranks."""

import math
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, check_mask

__all__ = ["RunningMoments", "scale_rewards"]


@dataclass(frozen=True)
class RunningMoments:
    """What is remembered of the numbers seen so far; `dataclasses.asdict` saves it.

    It is never changed: `update` and `merge` return a new one. Raises ValueError if the three
    numbers are not finite, or count or m2 are negative.

    Args:
        count: how many numbers were seen.
        mean: their mean.
        m2: the sum of the squares of their distances from it.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.count, self.mean, self.m2)
        if not all(map(math.isfinite, numbers)) or self.count < 0 or self.m2 < 0:
            raise ValueError(
                f"count, mean and m2 are {self.count}, {self.mean} and {self.m2}; give finite "
                "numbers, with count and m2 at least 0."
            )

    @classmethod
    def of(
        cls, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None
    ) -> "RunningMoments":
        """Take the moments of the real entries of x alone, in double precision.

        Raises ValueError if one of them is nan or inf, which would make all later moments nan, or
        if the mask has another shape.
        """
        check_mask(x, mask)
        real = (x if mask is None else x[mask]).detach().cpu().double().flatten()
        if not real.isfinite().all():
            raise ValueError(
                f"x holds {int((~real.isfinite()).sum())} numbers that are nan or inf; mask them, "
                "or look for what made them."
            )
        if not len(real):
            return cls()
        mean = real.mean()
        return cls(len(real), mean.item(), (real - mean).square().sum().item())

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        """Combine two streams, as if all numbers had been seen by one.

        1. Add the counts.
        2. Move the mean towards the other's by its share of the numbers.
        3. Add the squares, and those of the distance between the two means.

        M2 = M2_a + M2_b + d^2 n_a n_b / (n_a + n_b), d = mean_b - mean_a   (Chan, Golub and LeVeque
        1983, equation 2.1)
        """
        count = self.count + other.count
        if not count:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * other.count / count
        m2 = self.m2 + other.m2 + distance**2 * self.count * other.count / count
        return RunningMoments(count, mean, m2)

    def update(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None
    ) -> "RunningMoments":
        """Take in the real entries of x; raises ValueError as `of` does."""
        return self.merge(self.of(x, mask))

    @property
    def var(self) -> float:
        """The unbiased variance; 0.0 of one number, or none."""
        return self.m2 / max(self.count - 1, 1)

    @property
    def std(self) -> float:
        """The root of the unbiased variance."""
        return math.sqrt(self.var)


def scale_rewards(
    rewards: Float[Tensor, " batch"],
    moments: RunningMoments,
    shift_mean: bool = False,
    eps: float = 1e-8,
) -> Float[Tensor, " batch"]:
    """Bring rewards to the scale of all rewards seen so far, rather than of this batch.

    1. If `shift_mean`, subtract the running mean ("score norm"); otherwise 0 stays 0.
    2. Divide by the running standard deviation plus `eps`, unless that deviation is 0.

    Update the moments with the batch first. Within a batch the order of rewards is kept, and a
    reward means the same in every batch, which `normalize_reward` does not give.

    r' = (r - mean) / (std + eps)   (the score scaling and norm of TRL's PPO trainer)
    """
    rewards = at_least_float32(rewards)
    if shift_mean:
        rewards = rewards - moments.mean
    return rewards / (moments.std + eps) if moments.std > 0 else rewards
