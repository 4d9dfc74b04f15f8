"""Exact KL-optimal rewards of Reel, to compare with measured runs at the same KL."""

import numpy as np

from rlhf_lab.organism import (
    FrontierPoint,
    Grammar,
    Reward,
    build_graph,
    frontier,
    grammar_policy,
)

GRID = tuple(np.geomspace(1e3, 1e-3, 600))  # betas, from the reference to the largest KL


class ExactCurve:
    """The exact optima of a reward at all betas, ordered by KL.

    The reference is the grammar; the bundled model differs by a few hundredths of a nat.
    """

    def __init__(self, proxy: Reward) -> None:
        self.reference, self.proxy = grammar_policy(build_graph(Grammar())), proxy
        self.points = frontier(self.reference, proxy, GRID)

    def at_beta(self, beta: float) -> FrontierPoint:
        """Return the optimum of E[proxy] - beta KL."""
        return frontier(self.reference, self.proxy, [beta])[0]

    def at_kl(self, kl_per_sequence: float) -> FrontierPoint:
        """Return the optimum with this KL, interpolated linearly; the last one above its KL."""
        kl = [point.kl_per_sequence for point in self.points]
        columns = zip(*self.points, strict=True)
        return FrontierPoint(*(float(np.interp(kl_per_sequence, kl, c)) for c in columns))
