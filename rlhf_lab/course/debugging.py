"""Debugging PPO: dashboards, suspects, and a ladder of easy rewards."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.copying import new_run
from rlhf_lab.functional import compute_gae, get_logprobs, last_token_mask, token_rewards
from rlhf_lab.training.report import PhaseReport
from rlhf_lab.training.trainer import RLHFTrainer

# the name of each line, and its field of a report
COLUMNS: Mapping[str, str] = {
    "reward": "mean_reward",
    "KL per sequence": "kl_per_sequence",
    "KL penalty": "kl_penalty",
    "entropy": "entropy_per_token",
    "explained variance": "explained_variance",
    "value loss": "value_loss",
    "first ratio": "ratio_first_minibatch",
    "clipped": "clip_fraction",
    "gradient norm": "grad_norm",
}
SUSPECTS = (
    "the learning rate is 0",
    "the log-probabilities are off by one token",
    "the advantages have the wrong sign",
    "the advantages stand one token late",
    "each sequence is given the reward of another one",
    "the value loss has the wrong sign",
    "the KL penalty has the wrong sign",
    "the reference is not a copy: it learns along",
)
CULPRITS: Mapping[str, str] = {"A": SUSPECTS[7], "B": SUSPECTS[4], "C": SUSPECTS[6]}  # by run
# changes of the lesson's settings for the ladder: short texts, so that a climb takes seconds
LADDER_FIELDS: Mapping[str, Any] = {
    "batch_size": 64,
    "num_minibatches": 2,
    "base_lr": 6e-4,
    "total_phases": 12,
    "gen_len": 10,
}
GAMMA, LAM = 1.0, 0.95
NEAR_ONE, REWARD_TO_REACH = 0.1, 0.75  # distance of a constant's value from 1; other rewards


def make_dashboard(reports: Sequence[PhaseReport]) -> dict[str, list[float]]:
    """Return every line of the dashboard, phase by phase."""
    return {name: [getattr(r, field) for r in reports] for name, field in COLUMNS.items()}


def constant(texts: list[str]) -> Float[Tensor, " batch"]:
    """Return 1 for every text."""
    return torch.ones(len(texts))


def last_word(texts: list[str]) -> Float[Tensor, " batch"]:
    """Return 1 for texts whose last word begins with a letter from a to m."""
    return torch.tensor([_early_letter(text.split()[-1:]) for text in texts])


def first_word(texts: list[str]) -> Float[Tensor, " batch"]:
    """Return 1 for texts whose first word after the prompt begins with a letter from a to m."""
    prompt_words = len(RLHFArgs(preset="reel").prefix.split())
    return torch.tensor([_early_letter(text.split()[prompt_words:][:1]) for text in texts])


def _early_letter(words: list[str]) -> float:
    return float(any("a" <= word[:1].lower() <= "m" for word in words))


def one_token_late(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """Return advantages one token too late; the first token gets the last one."""
    return compute_gae(values, token_rewards(rewards, mask), GAMMA, LAM, mask).roll(1, dims=1)


def shifted_logprobs(
    logits: Tensor, tokens: Tensor, prefix_len: int, temperature: float = 1.0
) -> Tensor:
    """Return log-probabilities of the tokens before those that were sampled."""
    return get_logprobs(logits, tokens.roll(1, dims=1), prefix_len, temperature)


def credit_for_the_last(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """Return advantages for the last token only; all others get 0."""
    advantages = compute_gae(values, token_rewards(rewards, mask), GAMMA, LAM, mask)
    return advantages * last_token_mask(mask)


# the reward of each rung, and the settings that it changes
RUNGS: Mapping[str, tuple[Callable[..., Tensor], Mapping[str, Any]]] = {
    "1: value of a constant 1": (constant, {"normalize_reward": False}),
    "2: last word": (last_word, {}),
    "3: first word": (first_word, {}),
}
WRONG_CLIMBERS: Mapping[str, Mapping[str, Callable[..., Tensor]]] = {
    "one token late": {"advantages": one_token_late},
    "shifted log-probs": {"logprobs": shifted_logprobs},
    "credit for the last": {"advantages": credit_for_the_last},
}


def climb(
    settings: Mapping[str, Any], rung: str, parts: Mapping[str, Any], trainer: Any = RLHFTrainer
) -> float:
    """Train on one of `RUNGS`, and measure whether the trainer passes it.

    Measure: the mean last value of a fresh rollout, or the mean reward of the last three phases.
    """
    reward_fn, changes = RUNGS[rung]
    args = RLHFArgs(**{**settings, **LADDER_FIELDS, **changes})
    climber = trainer(args, out=new_run(f"rung {rung[0]}"), reward_fn=reward_fn, **parts)
    last = climber.train()[-3:]
    if reward_fn is constant:
        return climber.rollout_phase().samples.values[:, -1].mean().item()
    return sum(report.mean_reward for report in last) / len(last)


def falls_from(figures: Mapping[str, float]) -> int:
    """Return the number of the first rung that a trainer fails, or 4 if it passes all three."""
    value, *rewards = (figures[rung] for rung in RUNGS)
    passed = [abs(value - 1) < NEAR_ONE, *(reward > REWARD_TO_REACH for reward in rewards), False]
    return passed.index(False) + 1
