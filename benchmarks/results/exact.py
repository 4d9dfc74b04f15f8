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

GRID = tuple(np.geomspace(1e3, 1e-3, 600))
"""Prices of KL, from one at which nothing is bought to one at which everything is."""


class ExactCurve:
    """The exact optima of a reward at all prices of KL, ordered by their KL.

    The reference is the grammar, from which the bundled model is a few hundredths of a nat away.

    Args:
        proxy: what is maximised.
    """

    def __init__(self, proxy: Reward) -> None:
        self.reference, self.proxy = grammar_policy(build_graph(Grammar())), proxy
        self.points = frontier(self.reference, proxy, GRID)

    def at_price(self, beta: float) -> FrontierPoint:
        """The optimum of E[proxy] - beta KL."""
        return frontier(self.reference, self.proxy, [beta])[0]

    def at_kl(self, kl_per_sequence: float) -> FrontierPoint:
        """The optimum that has this KL, between two of the grid's on a straight line.

        Beyond the largest KL that buys anything it is the last one: more KL buys no more.
        """
        kl = [point.kl_per_sequence for point in self.points]
        columns = zip(*self.points, strict=True)
        return FrontierPoint(*(float(np.interp(kl_per_sequence, kl, c)) for c in columns))
