"""A ladder of easy rewards, trainers with one wrong part, and the stored runs of both."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.copying import new_run
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.functional import compute_gae, get_logprobs, last_token_mask, token_rewards
from rlhf_lab.training.trainer import RLHFTrainer

# changes of the settings of the lesson on PPO: short texts, so that a climb takes seconds
LADDER_FIELDS = MappingProxyType(
    {"batch_size": 64, "num_minibatches": 2, "base_lr": 6e-4, "total_phases": 12, "gen_len": 10}
)
GAMMA, LAM = 1.0, 0.95
NEAR_ONE, REWARD_TO_REACH = 0.1, 0.75  # distance of a constant's value from 1; other rewards


def constant(texts: list[str]) -> Float[Tensor, " batch"]:
    """1 for every text."""
    return torch.ones(len(texts))


def last_word(texts: list[str]) -> Float[Tensor, " batch"]:
    """1 for texts whose last word begins with a letter from a to m."""
    return torch.tensor([_early_letter(text.split()[-1:]) for text in texts])


def first_word(texts: list[str]) -> Float[Tensor, " batch"]:
    """1 for texts whose first word behind the prompt begins with a letter from a to m."""
    prompt_words = len(RLHFArgs(preset="reel").prefix.split())
    return torch.tensor([_early_letter(text.split()[prompt_words:][:1]) for text in texts])


def _early_letter(words: list[str]) -> float:
    return float(any("a" <= word[:1].lower() <= "m" for word in words))


def one_token_late(
    values: Float[Tensor, "batch gen"],
    rewards: Float[Tensor, " batch"],
    mask: Bool[Tensor, "batch gen"],
) -> Float[Tensor, "batch gen"]:
    """Advantages that stand one token too late; the last one comes round to the first token."""
    return compute_gae(values, token_rewards(rewards, mask), GAMMA, LAM, mask).roll(1, dims=1)


def shifted_logprobs(
    logits: Float[Tensor, "batch seq d_vocab"],
    tokens: Int[Tensor, "batch seq"],
    prefix_len: int,
    temperature: float = 1.0,
) -> Float[Tensor, "batch gen"]:
    """Log-probabilities of the tokens before those that were sampled."""
    return get_logprobs(logits, tokens.roll(1, dims=1), prefix_len, temperature)


def credit_for_the_last(
    values: Float[Tensor, "batch gen"],
    rewards: Float[Tensor, " batch"],
    mask: Bool[Tensor, "batch gen"],
) -> Float[Tensor, "batch gen"]:
    """Advantages for the last token only; all others get 0."""
    advantages = compute_gae(values, token_rewards(rewards, mask), GAMMA, LAM, mask)
    return advantages * last_token_mask(mask)


# the reward of each rung, and the settings that it changes
RUNGS: Mapping[str, tuple[Callable[..., Tensor], Mapping[str, Any]]] = MappingProxyType(
    {
        "1: value of a constant 1": (constant, {"normalize_reward": False}),
        "2: last word": (last_word, {}),
        "3: first word": (first_word, {}),
    }
)
# the wrong function of each trainer
WRONG_CLIMBERS: Mapping[str, Mapping[str, Callable[..., Tensor]]] = MappingProxyType(
    {
        "one token late": {"advantages": one_token_late},
        "shifted log-probs": {"logprobs": shifted_logprobs},
        "credit for the last": {"advantages": credit_for_the_last},
    }
)


def climb(
    settings: Mapping[str, Any],
    rung: str,
    parts: Mapping[str, Callable[..., Tensor]],
    trainer_class: type[RLHFTrainer] = RLHFTrainer,
) -> float:
    """Train on one rung, and measure whether the trainer passes it.

    The measure is the mean value before the last token in a fresh rollout on the first rung, and
    the mean reward of the last three phases on the others.

    Args:
        settings: fields of RLHFArgs.
        rung: one of `RUNGS`.
        parts: passed to the trainer.
    """
    reward_fn, changes = RUNGS[rung]
    args = RLHFArgs(**{**settings, **LADDER_FIELDS, **changes})
    climber = trainer_class(args, out=new_run(f"rung {rung[0]}"), reward_fn=reward_fn, **parts)
    last = climber.train()[-3:]
    if reward_fn is constant:
        return climber.rollout_phase().samples.values[:, -1].mean().item()
    return sum(report.mean_reward for report in last) / len(last)


def falls_from(figures: Mapping[str, float]) -> int:
    """The number of the first rung that is not held, or 4 where all three are."""
    value, *rewards = (figures[rung] for rung in RUNGS)
    held = [abs(value - 1) < NEAR_ONE, *(reward > REWARD_TO_REACH for reward in rewards), False]
    return held.index(False) + 1


def stored_climbs() -> dict[str, list[dict[str, float]]]:
    """Return figures of the package's trainer ("healthy") and of each wrong one, one per seed."""
    return stored_figures("bug_hunt")["climbs"]


def stored_others() -> dict[str, list[dict[str, list[float]]]]:
    """Return dashboards of healthy runs at other settings than the lesson's, one per seed."""
    return stored_figures("bug_hunt")["others"]


def stored_texts() -> dict[str, list[tuple[float, str]]]:
    """Return reward and text of three reviews after the last step of seed 1, by kind of run."""
    stored = stored_figures("bug_hunt")["texts"]
    return {kind: [(reward, text) for reward, text in rows] for kind, rows in stored.items()}
