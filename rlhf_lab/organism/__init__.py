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
    loss_penalty_policy,
    mean_backup,
    optimal_policy,
    soft_backup,
)
from rlhf_lab.organism.rewards import (
    REWARDS,
    Features,
    Reward,
    bag_of_adjectives,
    grammatical,
    ignore_negation,
    length,
    read_features,
    smoothed,
    smoothed_popcorn,
    true_reward,
)
