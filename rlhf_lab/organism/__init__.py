"""Reel: a movie-review language whose latents, values and optimal policies are known exactly."""

from rlhf_lab.organism.bundled import BUNDLED, weights_dir
from rlhf_lab.organism.grammar import Grammar, decode
from rlhf_lab.organism.graph import (
    Graph,
    GraphPolicy,
    backward_values,
    build_graph,
    grammar_policy,
    state_values,
    token_information,
)
from rlhf_lab.organism.lexicon import VOCABULARY, WORD_IDS
from rlhf_lab.organism.optimum import (
    BestOfNPoint,
    FrontierPoint,
    best_at_budget,
    best_of_n,
    frontier,
    loss_leash_policy,
    mean_backup,
    optimal_policy,
    soft_backup,
)
from rlhf_lab.organism.rewards import (
    REWARDS,
    Features,
    Reward,
    bagsum,
    gold,
    grammatical,
    length,
    negblind,
    read_features,
    soft,
    soft_popcorn,
)

__all__ = [
    "BUNDLED",
    "REWARDS",
    "VOCABULARY",
    "WORD_IDS",
    "BestOfNPoint",
    "Features",
    "FrontierPoint",
    "Grammar",
    "Graph",
    "GraphPolicy",
    "Reward",
    "backward_values",
    "bagsum",
    "best_at_budget",
    "best_of_n",
    "build_graph",
    "decode",
    "frontier",
    "gold",
    "grammar_policy",
    "grammatical",
    "length",
    "loss_leash_policy",
    "mean_backup",
    "negblind",
    "optimal_policy",
    "read_features",
    "soft",
    "soft_backup",
    "soft_popcorn",
    "state_values",
    "token_information",
    "weights_dir",
]
