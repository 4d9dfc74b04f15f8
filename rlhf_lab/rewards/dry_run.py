"""Trial of a run's rewards on a prompt, before anything is written."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import Message
from rlhf_lab.config import RLHFArgs, refuse_parts_of_batch, refuse_with_token_rewards
from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards.scoring import RewardFn, TextBatch, score_batch
from rlhf_lab.rewards.tokens import TokenReward
from rlhf_lab.rewards.weighted import naming, requires_answers, split_rewards

Prompt = tuple[int, ...]


def dry_run_rewards(
    reward_fn: RewardFn,
    args: RLHFArgs,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    text: str,
    answers: Sequence[str] | None,
    turns: Sequence[Message] | None = None,
) -> None:
    """Have a reward function, or each of several, read a prompt.

    Args:
        prompt, text: token ids and text of a prompt.
        answers: to the prompts, that one first; None where none are known.
        turns: the messages of the prompt in a chat, where what is said last is said once more.

    Raises:
        ConfigError: it returned something else than one finite number per text, pays each token or
            by the whole batch where settings do not go with that, or asks for answers that are not
            there; or no reward reads those that are.
    """
    functions = split_rewards(reward_fn)
    if answers is not None and not requires_answers(reward_fn):
        raise ConfigError(
            f"answers_column={args.answers_column!r} is read by no reward of this run; leave it "
            "out, or reward exact_match or a ResponseReward(answers=True)."
        )
    for name, reward in functions.items():
        try:
            if isinstance(reward, TokenReward):
                _try_on_tokens(reward, args, tokenizer, prompt)
            else:
                _try_on_texts(reward, name, args, text, answers, turns)
        except ConfigError as error:
            raise (error if len(functions) == 1 else naming(name, error)) from None


def _try_on_texts(
    reward: RewardFn,
    name: str,
    args: RLHFArgs,
    text: str,
    answers: Sequence[str] | None,
    turns: Sequence[Message] | None,
) -> None:
    """Have a reward read a prompt twice, or as often as a batch has it if it needs the batch."""
    whole_batch = getattr(reward, "whole_batch", False)
    if whole_batch:
        refuse_parts_of_batch(args, f"the reward {name!r}")
    times = args.batch_size if whole_batch else 2
    repeated = None if answers is None else [answers[0]] * times
    if turns is None:
        score_batch(reward, TextBatch([text] * times, [text] * times, repeated))
    else:
        said = [turns[-1]["content"]] * times
        score_batch(reward, TextBatch.in_chat([turns] * times, said, repeated))


def _try_on_tokens(
    reward: TokenReward, args: RLHFArgs, tokenizer: PreTrainedTokenizerBase, prompt: Prompt
) -> None:
    """Have a reward on token ids read a prompt twice."""
    reward.refuse_other_tokens(tokenizer)
    if args.labels_column is not None:
        raise ConfigError(
            f"labels_column={args.labels_column!r} is paid by a reward function of texts, "
            "and reward_fn reads token ids; leave labels_column out."
        )
    ids = torch.tensor([prompt] * 2)
    if reward(ids, torch.ones_like(ids, dtype=torch.bool)).ndim == 2:
        refuse_with_token_rewards(args)


def one_answer_each(
    prompts: Sequence[Prompt], texts: Sequence[str], answers: Sequence[str]
) -> dict[Prompt, str]:
    """The right answer to each prompt.

    Raises:
        ConfigError: a prompt that stands there with two different answers.
    """
    found: dict[Prompt, str] = {}
    for prompt, text, answer in zip(prompts, texts, answers, strict=True):
        if found.setdefault(prompt, answer) != answer:
            raise ConfigError(
                f"the prompt {text!r:.80} has two answers, {found[prompt]!r:.40} and "
                f"{answer!r:.40}; keep one of them, or raise prompt_words."
            )
    return found


def looked_up(
    prompts: Sequence[Prompt],
    known: Mapping[Prompt, Any],
    tokenizer: PreTrainedTokenizerBase,
    field: str,
    column: str | None,
) -> list[Any]:
    """What is known of each prompt, from the column that a field names.

    Raises:
        ConfigError: a prompt of which nothing is.
    """
    unknown = next((prompt for prompt in prompts if prompt not in known), None)
    if unknown is not None:
        what = field.removesuffix("s_column")
        raise ConfigError(
            f"the prompt {tokenizer.decode(unknown)!r} has no {what} under {field}={column!r}; "
            f"leave {field} out."
        )
    return [known[prompt] for prompt in prompts]
