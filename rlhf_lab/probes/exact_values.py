"""The exact values that belong to a run, by its language and its reward."""

import numpy as np

from rlhf_lab.organism.rewards import REWARDS, Reward, true_reward
from rlhf_lab.organism.sums import SUMS_REWARDS, SumsGrammar, SumsReward, SumsTruth
from rlhf_lab.organism.truth import Truth
from rlhf_lab.probes.reel_truth import ReelTruth
from rlhf_lab.training import RLHFTrainer


def exact_values(trainer: RLHFTrainer) -> tuple[Truth | None, str]:
    """Return exact values of a run's reward, and a note if they are of the true reward instead.

    None unless the policy starts as the grammar of a bundled language, on sums after whole sums. On
    Reel, rewards of settings without an exact form estimate the true reward, so they have no note.
    """
    if not trainer.starts_as_grammar:
        return None, ""
    name, is_custom = trainer.args.reward_fn, "reward_fn" in trainer.custom_components
    custom = trainer.reward_fn if is_custom else None
    if trainer.speaks_reel:
        reward = custom if is_custom else REWARDS.get(name, true_reward)
        truth = ReelTruth(reward if isinstance(reward, Reward) else None)
    else:
        reward, grammar = custom if is_custom else SUMS_REWARDS.get(name), SumsGrammar()
        prompts = [row[: grammar.prompt_len] for row in trainer.prompts.tokens]
        try:
            problems = grammar.read_problems(np.array(prompts))
        except ValueError:
            return None, ""
        truth = SumsTruth(reward if isinstance(reward, SumsReward) else None, problems)
    if truth.reward is reward:
        return truth, ""
    return truth, (
        f"this run has a {'custom reward' if is_custom else f'reward {name}'}, whose exact values "
        "are not known. The values here are exact for the true reward, the grammar's probability "
        "that a review is positive or that an answer is right."
    )
