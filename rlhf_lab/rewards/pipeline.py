"""The reward pipeline: all processing of a reward, in one order."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.chat import Message, make_turn
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import validate_token_rewards, validate_whole_batch
from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards.conversation import TextBatch, chat_answers
from rlhf_lab.rewards.scoring import (
    RewardFn,
    RewardOutput,
    Scores,
    requires_answers,
    score_batch,
    score_texts,
    split_rewards,
)
from rlhf_lab.rewards.tokens import TokenReward
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
    """

    args: RLHFArgs
    tokenizer: Any
    reward_fn: RewardFn
    true_reward_fn: RewardFn | None = None  # the true reward, if known
    stop_tokens: Sequence[int] = ()  # all token ids that end a sequence
    read_metrics: Callable[[list[str]], Mapping[str, Tensor]] | None = None  # of a language
    normalize: Callable[..., Tensor] = F.normalize_reward
    sample_greedily: Callable[[list[Prompt]], Samples] | None = None  # for ReMax
    compares: bool = False  # True if the advantages compare the responses to a prompt
    score_by_rank: Callable[..., RewardOutput] | None = None  # splits it between processes
    label_rewards: dict[Prompt, float] = field(init=False, default_factory=dict)
    answers: dict[Prompt, str] = field(init=False, default_factory=dict)  # the right ones
    conversations: dict[Prompt, Sequence[Message]] = field(init=False, default_factory=dict)
    moments: F.RunningMoments = field(init=False, default=F.RunningMoments())  # of learned phases

    def score(self, samples: Samples, raw_rewards: Float[Tensor, " batch"] | None = None) -> Scores:
        """Score samples, unless their raw rewards are known, and process the rewards."""
        texts = samples.texts(self.tokenizer)
        if raw_rewards is None:
            output = self.read(self.reward_fn, samples, texts)
        else:
            output = RewardOutput(score_texts(lambda texts: raw_rewards, texts))
        raw, token_rewards = output.rewards.to(samples.tokens.device), output.token_rewards
        moments, rewards = self.shape(samples, raw)
        if self.args.normalize_reward:
            normalized = self.normalize(rewards.clone())  # the function may change it
            rewards = F.check_result("normalize_reward", normalized, raw.shape, "response")
        if token_rewards is not None:  # the last token gets what processing changed
            token_rewards = token_rewards + F.token_rewards(rewards - raw, samples.mask)
        true_rewards = None
        if self.true_reward_fn is not None:
            true = self.read(self.true_reward_fn, samples, texts, "true_reward_fn")
            true_rewards = true.rewards.to(raw.device)
        metrics = self.read_metrics(texts) if self.read_metrics else {}
        return Scores(
            texts=texts,
            raw_rewards=raw,
            rewards=rewards,
            true_rewards=true_rewards,
            text_metrics={name: x.to(raw.device) for name, x in metrics.items()},
            reward_moments=moments,
            group=self.groups(samples),
            compared=self.compares,
            token_rewards=token_rewards,
            rewards_by_name={k: v.to(raw.device) for k, v in output.by_name.items()},
        )

    def read(
        self,
        reward_fn: RewardFn,
        samples: Samples,
        texts: list[str] | None = None,
        field: str = "reward_fn",
    ) -> RewardOutput:
        """Score samples, without processing; see `score_batch`. `texts` are the decoded samples."""
        if self.score_by_rank is not None and not _needs_whole_batch(reward_fn):
            score_rows = lambda rows: score_batch(reward_fn, self._batch(rows), field)
            return self.score_by_rank(samples, score_rows)
        return score_batch(reward_fn, self._batch(samples, texts), field)

    def _batch(self, samples: Samples, texts: list[str] | None = None) -> TextBatch:
        prompts = samples.prompt_texts(self.tokenizer)
        answers = self._look_up(samples, "answers_column", self.answers) if self.answers else None
        if not self.conversations:
            texts = samples.texts(self.tokenizer) if texts is None else texts
            return TextBatch(texts, prompts, answers, samples)
        responses = chat_answers(samples, self.tokenizer, self.stop_tokens)
        rows, chats = zip(samples.prompts(), prompts, strict=True), self.conversations
        chats = [chats.get(tuple(ids)) or [make_turn("user", text)] for ids, text in rows]
        return TextBatch.in_chat(chats, responses, answers, samples)

    def _look_up(self, samples: Samples, column: str, values: Mapping[Prompt, Any]) -> list[Any]:
        prompts = [tuple(prompt) for prompt in samples.prompts()]
        for prompt in prompts:
            if prompt not in values:
                raise ConfigError(
                    f"the prompt {self.tokenizer.decode(prompt)!r} is not among the prompts of "
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
        """Apply steps 2 to 5, and return the moments as well.

        If `moments` is None, those of the run are updated with these rewards.
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
        """Return the reward of greedy decoding on the prompt of each row, for ReMax; else None."""
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

    def try_on(
        self,
        prompts: Sequence[Sequence[int]],
        texts: list[str],
        labels: list[str] | None = None,
        answers: list[str] | None = None,
        turns: list[list[Message]] | None = None,
    ) -> None:
        """Store what `Prompts` knows of each prompt, and call each reward function on the first.

        The reward of a prompt's label is stored as well; the mean if it has several labels.

        Raises:
            ConfigError: See `dry_run`; or if a prompt has two different answers.
        """
        keys = [tuple(prompt) for prompt in prompts]
        for key, text, answer in zip(keys, texts, answers or [], strict=False):
            if self.answers.setdefault(key, answer) != answer:
                raise ConfigError(
                    f"the prompt {text!r:.80} has two answers, {self.answers[key]!r:.40} and "
                    f"{answer!r:.40}. Remove one of them, or raise prompt_words."
                )
        if turns is not None:
            self.conversations = dict(zip(keys, turns, strict=True))
        self.dry_run(prompts[0])
        if labels is None:
            return
        if turns is None:
            whole = [f"{text} {label}" for text, label in zip(texts, labels, strict=True)]
            labeled = TextBatch(whole, texts, answers)
        else:
            labeled = TextBatch.in_chat(turns, labels, answers)
        by_prompt = defaultdict(list)
        rewards = score_batch(self.reward_fn, labeled).rewards.tolist()
        for key, reward in zip(keys, rewards, strict=True):
            by_prompt[key].append(reward)
        self.label_rewards = {key: statistics.mean(each) for key, each in by_prompt.items()}

    def dry_run(self, prompt: Sequence[int]) -> None:
        """Call each reward function on a small batch of responses, before anything is written.

        Raises:
            ConfigError: If a function does not return one finite number per text, or per-token and
                whole-batch rewards conflict with the settings, or answers are missing or not read.
        """
        args = self.args
        if self.answers and not requires_answers(self.reward_fn):
            raise ConfigError(
                f"answers_column={args.answers_column!r} is read by no reward of this run. Remove "
                "it, or set reward_fn to exact_match or a ResponseReward(answers=True)."
            )
        n = args.batch_size if _needs_whole_batch(self.reward_fn) else 2
        tokens = torch.tensor([[*prompt, prompt[-1]]] * n)  # the response repeats the last token
        real, none = torch.ones_like(tokens, dtype=torch.bool), torch.zeros(n, 1)
        samples = Samples(tokens, real[:, 1:], real[:, :1], none, none, support=None)
        for name, reward in split_rewards(self.reward_fn).items():
            if getattr(reward, "whole_batch", False):
                validate_whole_batch(args, f"the reward {name!r}")
            if isinstance(reward, TokenReward):
                reward.validate_tokenizer(self.tokenizer)
                if args.labels_column is not None:
                    raise ConfigError(
                        f"labels_column={args.labels_column!r} requires a reward of texts, and "
                        f"{name} reads token ids. Remove labels_column."
                    )
        if score_batch(self.reward_fn, self._batch(samples)).token_rewards is not None:
            validate_token_rewards(args)


def _needs_whole_batch(reward_fn: RewardFn) -> bool:
    rewards = split_rewards(reward_fn).values()
    return any(getattr(reward, "whole_batch", False) for reward in rewards)
