"""Dry run of a run's rewards on a prompt, before anything is written."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.conflicts import validate_token_rewards, validate_whole_batch
from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards.scoring import (
    RewardFn,
    TextBatch,
    name_in_error,
    requires_answers,
    score_batch,
    split_rewards,
)
from rlhf_lab.rewards.tokens import TokenReward


def dry_run_rewards(
    reward_fn: RewardFn,
    args: RLHFArgs,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    batch: TextBatch,
) -> None:
    """Call each reward function on a prompt, repeated.

    Args:
        prompt: the token ids of a prompt.
        batch: its text, twice.

    Raises:
        ConfigError: If a function does not return one finite number per text, or per-token and
            whole-batch rewards conflict with the settings, or answers are missing or not read.
    """
    functions = split_rewards(reward_fn)
    if batch.answers is not None and not requires_answers(reward_fn):
        raise ConfigError(
            f"answers_column={args.answers_column!r} is read by no reward of this run. Remove it, "
            "or set reward_fn to exact_match or a ResponseReward(answers=True)."
        )
    for name, reward in functions.items():
        try:
            if getattr(reward, "whole_batch", False):
                validate_whole_batch(args, f"the reward {name!r}")
            if isinstance(reward, TokenReward):
                _dry_run_tokens(reward, args, tokenizer, prompt)
            else:
                score_batch(reward, batch)
        except ConfigError as error:
            raise (error if len(functions) == 1 else name_in_error(name, error)) from None


def _dry_run_tokens(
    reward: TokenReward,
    args: RLHFArgs,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
) -> None:
    reward.validate_tokenizer(tokenizer)
    if args.labels_column is not None:
        raise ConfigError(
            f"labels_column={args.labels_column!r} is scored by a reward function of texts, and "
            "reward_fn reads token ids. Remove labels_column."
        )
    ids = torch.tensor([prompt] * 2)
    if reward(ids, torch.ones_like(ids, dtype=torch.bool)).ndim == 2:
        validate_token_rewards(args)
