"""The reward pipeline: all processing of a reward, in one order."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.chat import Message, user_turn
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism.rewards import grammatical
from rlhf_lab.rewards.conversation import chat_answers
from rlhf_lab.rewards.dry_run import dry_run_rewards
from rlhf_lab.rewards.scoring import (
    RewardFn,
    RewardOutput,
    Scores,
    TextBatch,
    score_batch,
    score_texts,
    split_rewards,
)
from rlhf_lab.samples import Samples

Prompt = tuple[int, ...]


@dataclass(eq=False)
class RewardPipeline:
    """From samples to the rewards that advantages are computed from.

    1. score: call the reward function on texts, responses (`ResponseReward`) or token ids
       (`TokenReward`); several give their weighted sum (`WeightedRewards`).
    2. labels: subtract the rewards of the labels of the same prompts (`labels_column`).
    3. penalties: for responses that are too short, unfinished or overlong.
    4. scale: divide by the running standard deviation, subtract the running mean
       (`reward_scaling`).
    5. clip: to `reward_clip`.
    6. standardize within the batch (`normalize_reward`).

    Args:
        true_reward_fn: the true reward, if known.
        stop_tokens: all token ids that end a sequence.
        check_grammar: True if texts are parsed, on Reel.
        normalize: the function that standardizes the rewards of a batch.
        sample_greedily: from prompts to their most likely continuations, for ReMax.
        compares: True if the advantage estimator compares the responses to a prompt.
        score_by_rank: splits scoring between processes; None for one process. A reward of the whole
            batch always gets the whole batch.

    Attributes:
        label_rewards: the reward of each prompt's label, if there are labels.
        answers: the right answer to each prompt, if known.
        conversations: the messages of each prompt, in a chat.
        moments: mean and variance of the rewards of all learned phases.
    """

    args: RLHFArgs
    tokenizer: Any
    reward_fn: RewardFn
    true_reward_fn: RewardFn | None = None
    stop_tokens: Sequence[int] = ()
    check_grammar: bool = False
    normalize: Callable[..., Tensor] = F.normalize_reward
    sample_greedily: Callable[[list[Prompt]], Samples] | None = None
    compares: bool = False
    score_by_rank: Callable[..., RewardOutput] | None = None
    label_rewards: dict[Prompt, float] = field(init=False, default_factory=dict)
    answers: dict[Prompt, str] = field(init=False, default_factory=dict)
    conversations: dict[Prompt, Sequence[Message]] = field(init=False, default_factory=dict)
    moments: F.RunningMoments = field(init=False, default=F.RunningMoments())

    def score(self, samples: Samples, raw_rewards: Float[Tensor, " batch"] | None = None) -> Scores:
        """Score samples and process their rewards.

        Args:
            raw_rewards: known scores, instead of those of the reward function.

        Raises:
            ConfigError: If the reward function does not return one finite number per text, or a
                prompt has no label.
        """
        texts = samples.texts(self.tokenizer)
        if raw_rewards is None:
            output = self.read(self.reward_fn, samples, texts)
        else:
            output = RewardOutput(score_texts(lambda texts: raw_rewards, texts))
        raw, token_rewards = output.rewards.to(samples.tokens.device), output.token_rewards
        moments, rewards = self.shape(samples, raw)
        if self.args.normalize_reward:
            rewards = self.normalize(rewards)
        if token_rewards is not None:  # the last token gets what processing changed
            token_rewards = token_rewards + F.token_rewards(rewards - raw, samples.mask)
        true_reward = (
            self.read(self.true_reward_fn, samples, texts).rewards if self.true_reward_fn else None
        )
        return Scores(
            texts=texts,
            raw_rewards=raw,
            rewards=rewards,
            true_rewards=true_reward,
            grammatical=grammatical(texts) if self.check_grammar else None,
            reward_moments=moments,
            group=self.groups(samples),
            compared=self.compares,
            token_rewards=token_rewards,
            rewards_by_name={k: v.to(raw.device) for k, v in output.by_name.items()},
        )

    def read(
        self, reward_fn: RewardFn, samples: Samples, texts: list[str] | None = None
    ) -> RewardOutput:
        """Score samples with a reward function, without processing.

        Args:
            texts: the decoded samples, if available.

        Raises:
            ConfigError: See `score_batch`; or if a prompt has no answer.
        """
        if self.score_by_rank is not None and not _needs_whole_batch(reward_fn):
            score_rows = lambda rows: score_batch(reward_fn, self._batch(rows))
            return self.score_by_rank(samples, score_rows)
        return score_batch(reward_fn, self._batch(samples, texts))

    def _batch(self, samples: Samples, texts: list[str] | None = None) -> TextBatch:
        prompts = samples.prompt_texts(self.tokenizer)
        answers = self._look_up(samples, "answers_column", self.answers) if self.answers else None
        if not self.conversations:
            texts = samples.texts(self.tokenizer) if texts is None else texts
            return TextBatch(texts, prompts, answers, samples)
        responses = chat_answers(samples, self.tokenizer, self.stop_tokens)
        rows = zip(samples.prompts(), prompts, strict=True)
        chats = [self.conversations.get(tuple(ids)) or [user_turn(text)] for ids, text in rows]
        return TextBatch.in_chat(chats, responses, answers, samples)

    def _look_up(self, samples: Samples, column: str, values: Mapping[Prompt, Any]) -> list[Any]:
        prompts = [tuple(prompt) for prompt in samples.prompts()]
        for prompt in prompts:
            if prompt not in values:
                raise ConfigError(
                    f"the prompt {self.tokenizer.decode(prompt)!r} has no "
                    f"{column.removesuffix('s_column')} under "
                    f"{column}={getattr(self.args, column)!r}. Remove {column}."
                )
        return [values[prompt] for prompt in prompts]

    def groups(self, samples: Samples) -> Int[Tensor, " batch"] | None:
        """Return the index of each row's prompt; None with one response per prompt."""
        each = self.args.samples_per_prompt
        if each == 1:
            return None
        return F.prompt_groups(len(samples.tokens), each).to(samples.tokens.device)

    def shape(
        self,
        samples: Samples,
        raw_rewards: Float[Tensor, " batch"],
        moments: F.RunningMoments | None = None,
    ) -> tuple[F.RunningMoments | None, Float[Tensor, " batch"]]:
        """Apply steps 2 to 5: labels, penalties, scale and clip. Return the moments as well.

        Args:
            moments: to scale by; when None, those of the run updated with these rewards.
        """
        rewards = raw_rewards
        if self.label_rewards:
            labels = self._look_up(samples, "labels_column", self.label_rewards)
            rewards = F.rewards_over_labels(rewards, rewards.new_tensor(labels))
        rewards = self.penalize(samples, rewards)
        if self.args.reward_scaling != "off":
            moments = moments or self.moments.update(rewards)
            shift = self.args.reward_scaling == "scale_and_shift"
            rewards = F.scale_rewards(rewards, moments, shift)
        if self.args.reward_clip is not None:
            rewards = F.clip_rewards(rewards, self.args.reward_clip)
        return moments, rewards

    def try_on(
        self,
        prompts: Sequence[Sequence[int]],
        texts: list[str],
        labels: list[str] | None = None,
        answers: list[str] | None = None,
        turns: list[list[Message]] | None = None,
    ) -> None:
        """Call each reward function on the first prompt, and on each prompt with its label.

        The reward of a label is stored; the mean if a prompt has several labels.

        Args:
            prompts, texts: token ids and text of each prompt.
            labels, answers, turns: see `Prompts`.

        Raises:
            ConfigError: See `dry_run_rewards`; or if a prompt has two different answers.
        """
        keys, n = [tuple(prompt) for prompt in prompts], 2
        if _needs_whole_batch(self.reward_fn):
            n = self.args.batch_size
        for key, text, answer in zip(keys, texts, answers or [], strict=False):
            if self.answers.setdefault(key, answer) != answer:
                raise ConfigError(
                    f"the prompt {text!r:.80} has two answers, {self.answers[key]!r:.40} and "
                    f"{answer!r:.40}. Remove one of them, or raise prompt_words."
                )
        one_answer = answers and answers[:1] * n
        if turns is None:
            first = TextBatch(texts[:1] * n, texts[:1] * n, one_answer)
        else:
            self.conversations = dict(zip(keys, turns, strict=True))
            first = TextBatch.in_chat(turns[:1] * n, [turns[0][-1]["content"]] * n, one_answer)
        dry_run_rewards(self.reward_fn, self.args, self.tokenizer, prompts[0], first)
        if labels is None:
            return
        if turns is None:
            whole = [f"{text} {label}" for text, label in zip(texts, labels, strict=True)]
            labeled = TextBatch(whole, texts, answers)
        else:
            labeled = TextBatch.in_chat(turns, labels, answers)
        rewards = score_batch(self.reward_fn, labeled).rewards.tolist()
        by_prompt = defaultdict(list)
        for key, reward in zip(keys, rewards, strict=True):
            by_prompt[key].append(reward)
        self.label_rewards = {key: statistics.mean(each) for key, each in by_prompt.items()}

    def penalize(
        self, samples: Samples, rewards: Float[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Apply the penalties for the lengths of responses.

        1. `reward_penalty` replaces the reward of responses that are too short
           (`min_response_length`) or do not end with a stop token (`penalize_no_eos`).
        2. Up to 1 is subtracted for responses that reach the last `overlong_buffer` tokens.
        """
        args, mask = self.args, samples.mask
        if args.penalize_no_eos or args.min_response_length:
            finished = None
            if args.penalize_no_eos:
                tokens = samples.tokens[:, samples.prefix_len :]
                finished = F.has_stop(tokens, self.stop_tokens, mask)
            flawed = F.flawed_responses(mask, finished, args.min_response_length)
            rewards = F.penalize_responses(rewards, flawed, args.reward_penalty)
        if args.overlong_buffer:
            rewards = rewards + F.overlong_penalty(mask, args.gen_len, args.overlong_buffer)
        return rewards

    def greedy_rewards(
        self, samples: Samples, moments: F.RunningMoments | None
    ) -> Float[Tensor, " batch"] | None:
        """Return the reward of greedy decoding on the prompt of each row, for ReMax; else None.

        Args:
            moments: those that the rewards of the samples were scaled by.
        """
        if self.sample_greedily is None:
            return None
        prompts = [tuple(prompt) for prompt in samples.prompts()]
        distinct = list(dict.fromkeys(prompts))
        greedy = self.sample_greedily(distinct)
        rewards = self.read(self.reward_fn, greedy).rewards
        _, rewards = self.shape(greedy, rewards.to(samples.tokens.device), moments)
        return rewards[[distinct.index(prompt) for prompt in prompts]]

    def remember(self, moments: F.RunningMoments | None) -> None:
        """Continue from the moments of a learned phase, if rewards are scaled."""
        self.moments = moments or self.moments


def _needs_whole_batch(reward_fn: RewardFn) -> bool:
    rewards = split_rewards(reward_fn).values()
    return any(getattr(reward, "whole_batch", False) for reward in rewards)
