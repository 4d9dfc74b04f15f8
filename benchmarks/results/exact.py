"""Exact KL-optimal rewards of Reel, to compare with measured runs at the same KL."""

import numpy as np

from rlhf_lab.organism import (
    REWARDS,
    FrontierPoint,
    Grammar,
    Reward,
    build_graph,
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
        graph = build_graph(Grammar())
        features = graph.final_features()
        self.chances = grammar_policy(graph).occupancy()[-1]
        self.proxy = proxy.score(features)
        self.gold = REWARDS["gold"].score(features)
        self.popcorn = features.popcorn.astype(float)
        self.points = [self.at_price(beta) for beta in GRID]

    def at_price(self, beta: float) -> FrontierPoint:
        """The optimum of E[proxy] - beta KL.

        pi*(x) = ref(x) exp(proxy(x) / beta) / Z, and KL = E[proxy] / beta - log Z (Korbak et al.
        2022, arXiv 2205.11275), over the states in which whole reviews end.
        """
        highest = self.proxy.max() / beta
        weight = self.chances * np.exp(self.proxy / beta - highest)
        total = weight.sum()
        proxy, gold, popcorn = (
            float((weight * figure).sum() / total)
            for figure in (self.proxy, self.gold, self.popcorn)
        )
        kl = proxy / beta - float(np.log(total) + highest)
        return FrontierPoint(beta, proxy, gold, kl, popcorn)

    def at_kl(self, kl_per_sequence: float) -> FrontierPoint:
        """The optimum that has this KL, between two of the grid's on a straight line.

        Beyond the largest KL that buys anything it is the last one: more KL buys no more.
        """
        kl = [point.kl_per_sequence for point in self.points]
        columns = zip(*self.points, strict=True)
        return FrontierPoint(*(float(np.interp(kl_per_sequence, kl, c)) for c in columns))
