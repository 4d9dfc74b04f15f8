"""Sums: an arithmetic language whose pass@k, optima and values are known exactly."""

from rlhf_lab.organism.sums.exact import (
    Outcomes,
    TiltPoint,
    carry_patterns,
    column_probability,
    modal_answer,
    outcomes,
    solve_probability,
    sums_frontier,
    writer_solve_probability,
)
from rlhf_lab.organism.sums.grammar import SumsGrammar, Worked
from rlhf_lab.organism.sums.problems import (
    SUMS_IDS,
    SUMS_OPENERS,
    SUMS_WORDS,
    WRITERS,
    Parse,
    Problems,
    make_prompts,
)
from rlhf_lab.organism.sums.rewards import (
    SUMS_REWARDS,
    CoinReward,
    MajorityReward,
    SumsReward,
    is_held_out,
    load_sums_prompts,
)
from rlhf_lab.organism.sums.scoring import (
    faithful_fraction,
    model_solve_probability,
    right_texts,
    text_metrics,
)
from rlhf_lab.organism.sums.trace import Traced, trace
from rlhf_lab.organism.sums.truth import SumsTruth
