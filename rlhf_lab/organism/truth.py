"""Exact values of a bundled language, as probes use them: what Reel and sums share."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional import zero_masked

LEAST_BETA, LARGEST_BETA, BISECTIONS = 1e-3, 1e3, 30


class Optimum(NamedTuple):
    """The best policy at one price of KL: its expected reward, and its KL in nats per sequence."""

    beta: float
    reward: float
    kl_per_sequence: float


class Truth:
    """Exact values and optima of a reward, under the grammar that a bundled policy starts from.

    The value of a prefix is the expected reward when the grammar generates the rest. A subclass
    defines `slot_names`, `values`, `optimum` and `eval_text` (tokens, their mask, and labels or
    None), and has a `reward`; the methods that are empty here are of one language only.
    """

    information: Float[Tensor, " seq"] | None = None

    def generated(
        self, tokens: Int[Tensor, "batch seq"], prefix_len: int
    ) -> tuple[Float[Tensor, "batch gen"], Float[Tensor, "batch gen"], Bool[Tensor, "batch gen"]]:
        """Return the value before each generated token, its advantage, and where both are defined.

        The advantage of a token is the value after it minus the value before it.
        """
        values, mask = self.values(tokens)
        before, after = values[:, prefix_len - 1 : -1], values[:, prefix_len:]
        defined = mask[:, prefix_len:]
        return zero_masked(before, defined), zero_masked(after - before, defined), defined

    def best_at_kl(self, kl: float) -> Optimum:
        """Return the best policy whose KL is at most `kl` nats: the optimum at some beta.

        The KL of optima falls as beta rises, so bisect log beta; with more KL than any optimum has,
        return the optimum at the least beta, 0.001.
        """
        low, high = math.log(LEAST_BETA), math.log(LARGEST_BETA)
        if self.optimum(LEAST_BETA).kl_per_sequence <= kl:
            return self.optimum(LEAST_BETA)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            is_above = self.optimum(math.exp(middle)).kl_per_sequence > kl
            low, high = (middle, high) if is_above else (low, middle)
        return self.optimum(math.exp(high))

    def fits(self, tokens: Int[Tensor, "batch seq"], labels: Bool[Tensor, " batch"]) -> bool:
        """Return True if the labels can be the hidden sentiment of these texts, on Reel."""
        return False

    def beliefs_by_name(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> dict[str, Float[Tensor, "batch seq"]]:
        """Return the probability of each writer after each token, on sums."""
        return {}

    def steps(self, tokens: Int[Tensor, "batch seq"]) -> Sequence[dict[str, Any]]:
        """Return each column of each text, as written and as true, on sums."""
        return ()

    def answer_key(self) -> Sequence[dict[str, Any]]:
        """Return the optimum at several betas, on sums."""
        return ()
