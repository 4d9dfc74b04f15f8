"""The reward pipeline: everything that is done to a reward, in one order."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.chat import Message, user_turn
from rlhf_lab.config import RLHFArgs
from rlhf_lab.organism.rewards import grammatical
from rlhf_lab.rewards.conversation import ConversationReward, chat_answers
from rlhf_lab.rewards.dry_run import Prompt, dry_run_rewards, looked_up, one_answer_each
from rlhf_lab.rewards.responses import ResponseReward
from rlhf_lab.rewards.scoring import RewardFn, RewardOutput, TextBatch, score_batch, score_texts
from rlhf_lab.rewards.weighted import split_rewards
from rlhf_lab.samples import Samples


@dataclass(frozen=True)
class Scores:
    """A batch of texts with their rewards.

    Args:
        raw_rewards: as the reward function returned them; their sums, if it pays each token.
        rewards: after everything that is done to them.
        token_rewards: what each token earns of `rewards`, if the reward function pays each token.
        gold_rewards: the known truth beside the reward, where there is one (Reel).
        grammatical: whether each text parses, where that is known (Reel).
        reward_moments: mean and variance of all rewards so far, these included, if rewards are
            scaled.
        group: the number of the prompt that each text answers, if prompts have several answers.
        compared: whether advantages compare the answers of a group.
        rewards_by_name: what each of several rewards output, before it was weighted; their weighted
            sum is `raw_rewards`. Empty where there is one.
    """

    texts: list[str]
    raw_rewards: Float[Tensor, " batch"]
    rewards: Float[Tensor, " batch"]
    gold_rewards: Float[Tensor, " batch"] | None
    grammatical: Bool[Tensor, " batch"] | None
    reward_moments: F.RunningMoments | None = None
    group: Int[Tensor, " batch"] | None = None
    compared: bool = False
    token_rewards: Float[Tensor, "batch gen"] | None = None
    rewards_by_name: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)

    @property
    def credit_rewards(self) -> Float[Tensor, " batch"] | Float[Tensor, "batch gen"]:
        """What credit is assigned from: the rewards of the tokens, where there are some."""
        return self.rewards if self.token_rewards is None else self.token_rewards


@dataclass(eq=False)
class RewardPipeline:
    """From samples to the rewards that advantages are made of.

    1. score: the reward function reads the texts, the responses (`ResponseReward`) or the token ids
       (`TokenReward`); of several, the weighted sum goes on (`WeightedRewards`).
    2. labels: less what the labels of the same prompts earn (`labels_column`).
    3. penalties: for responses that are too short, unfinished or overlong.
    4. scale: by the running standard deviation, and shifted by the running mean
       (`reward_scaling`).
    5. clip: to `reward_clip`.
    6. standardize within the batch (`normalize_reward`).

    Args:
        gold_fn: the known truth, where there is one.
        stop_tokens: all token ids that end a sequence.
        check_grammar: say of each text whether it parses, on Reel.
        normalize: what standardizes the rewards of a batch.
        sample_greedily: the likeliest continuation of each prompt, for ReMax; None where no
            estimator asks for it.
        compares: whether the estimator of the advantages compares the answers to a prompt.
        dealt: has a function look at samples, of which each of several processes has its rows; all
            by this one when None. A reward of the whole batch is always shown all of it.

    Attributes:
        label_rewards: what the label of each prompt earns, where there are labels.
        answers: the right answer to each prompt, where they are known.
        conversations: the messages of each prompt, in a chat.
        moments: mean and variance of the rewards of all phases that were learned from.
    """

    args: RLHFArgs
    tokenizer: Any
    reward_fn: RewardFn
    gold_fn: RewardFn | None = None
    stop_tokens: Sequence[int] = ()
    check_grammar: bool = False
    normalize: Callable[..., Tensor] = F.normalize_reward
    sample_greedily: Callable[[list[Prompt]], Samples] | None = None
    compares: bool = False
    dealt: Callable[[Samples, Callable[[Samples], RewardOutput]], RewardOutput] | None = None
    label_rewards: dict[Prompt, float] = field(init=False, default_factory=dict)
    answers: dict[Prompt, str] = field(init=False, default_factory=dict)
    conversations: dict[Prompt, Sequence[Message]] = field(init=False, default_factory=dict)
    moments: F.RunningMoments = field(init=False, default=F.RunningMoments())

    def score(self, samples: Samples, raw_rewards: Float[Tensor, " batch"] | None = None) -> Scores:
        """Score samples, and do to their rewards everything that the settings ask for.

        Args:
            raw_rewards: scores that are known already; the reward function is not asked then.

        Raises:
            ConfigError: the reward function returned something else than one finite number per
                text, or a prompt has no label.
        """
        texts = samples.texts(self.tokenizer)
        if raw_rewards is None:
            output = self.read(self.reward_fn, samples, texts)
        else:
            output = RewardOutput(score_texts(lambda texts: raw_rewards, texts))
        raw, of_tokens = output.rewards.to(samples.tokens.device), output.token_rewards
        moments, rewards = self.shape(samples, raw)
        if self.args.normalize_reward:
            rewards = self.normalize(rewards)
        if of_tokens is not None:  # what the whole text loses, its last token loses
            of_tokens = of_tokens + F.token_rewards(rewards - raw, samples.mask)
        gold = self.read(self.gold_fn, samples, texts).rewards if self.gold_fn else None
        return Scores(
            texts=texts,
            raw_rewards=raw,
            rewards=rewards,
            gold_rewards=gold,
            grammatical=grammatical(texts) if self.check_grammar else None,
            reward_moments=moments,
            group=self.groups(samples),
            compared=self.compares,
            token_rewards=of_tokens,
            rewards_by_name={k: v.to(raw.device) for k, v in output.by_name.items()},
        )

    def read(
        self, reward_fn: RewardFn, samples: Samples, texts: list[str] | None = None
    ) -> RewardOutput:
        """What a reward function pays each sequence, each token, and each by name of several.

        Several processes read their rows each, unless one reward is of the whole batch. Rewards of
        texts are on the device that the function left them on.

        Args:
            texts: of the samples, where they are at hand.

        Raises:
            ConfigError: see `score_batch`, or a prompt has no answer where answers are read.
        """
        of_batch = any(getattr(r, "whole_batch", False) for r in split_rewards(reward_fn).values())
        if self.dealt is not None and not of_batch:
            return self.dealt(samples, lambda rows: self._read(reward_fn, rows))
        return self._read(reward_fn, samples, texts)

    def _read(
        self, reward_fn: RewardFn, samples: Samples, texts: list[str] | None = None
    ) -> RewardOutput:
        """`read`, by this process alone."""
        if self.conversations:
            return score_batch(reward_fn, self._in_chat(samples))
        texts = samples.texts(self.tokenizer) if texts is None else texts
        apart = (ResponseReward, ConversationReward)
        if not any(isinstance(reward, apart) for reward in split_rewards(reward_fn).values()):
            return score_batch(reward_fn, TextBatch(texts, samples=samples))
        prompts = samples.prompt_texts(self.tokenizer)
        return score_batch(reward_fn, TextBatch(texts, prompts, self._answers_to(samples), samples))

    def _in_chat(self, samples: Samples) -> TextBatch:
        """The responses of a chat, and what they answer; other prompts are a user's turn."""
        responses = chat_answers(samples, self.tokenizer, self.stop_tokens)
        rows = zip(samples.prompts(), samples.prompt_texts(self.tokenizer), strict=True)
        asked = [self.conversations.get(tuple(ids)) or [user_turn(text)] for ids, text in rows]
        return TextBatch.in_chat(asked, responses, self._answers_to(samples), samples)

    def _answers_to(self, samples: Samples) -> list[str] | None:
        """The right answer to the prompt of each row; None where there are no answers."""
        return self._known(samples, self.answers, "answers_column") if self.answers else None

    def _known(self, samples: Samples, known: Mapping[Prompt, Any], field: str) -> list[Any]:
        """What is known of the prompt of each row; see `looked_up`."""
        prompts = [tuple(prompt) for prompt in samples.prompts()]
        return looked_up(prompts, known, self.tokenizer, field, getattr(self.args, field))

    def groups(self, samples: Samples) -> Int[Tensor, " batch"] | None:
        """Which prompt each row answers, by number; None with one answer to each."""
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
        """Labels, penalties, scale and clip: steps 2 to 5, and the moments that were scaled by.

        Args:
            moments: to scale by; the run's with these rewards taken in, when None.
        """
        rewards = self.penalize(samples, self.less_labels(samples, raw_rewards))
        if self.args.reward_scaling != "off":
            moments = moments or self.moments.update(rewards)
            shift = self.args.reward_scaling == "scale_and_shift"
            rewards = F.scale_rewards(rewards, moments, shift)
        if self.args.reward_clip is not None:
            rewards = F.clip_rewards(rewards, self.args.reward_clip)
        return moments, rewards

    def less_labels(
        self, samples: Samples, rewards: Float[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Rewards less what the labels of the same prompts earn, where there are labels.

        Raises:
            ConfigError: a prompt that has no label.
        """
        if not self.label_rewards:
            return rewards
        labels = self._known(samples, self.label_rewards, "labels_column")
        return F.rewards_over_labels(rewards, rewards.new_tensor(labels))

    def try_on(
        self,
        prompts: Sequence[Sequence[int]],
        texts: list[str],
        labels: list[str] | None = None,
        answers: list[str] | None = None,
        turns: list[list[Message]] | None = None,
    ) -> None:
        """Have each reward function read a prompt, and each prompt with its label behind it.

        What a label earns is noted: its mean, if a prompt has several labels.

        Args:
            prompts, texts: token ids and text of each prompt.
            labels, answers, turns: see `Prompts`.

        Raises:
            ConfigError: it returned something else than one finite number per text, pays each token
                or by the whole batch where settings do not go with that, or asks for answers that
                are not there.
        """
        keys = [tuple(prompt) for prompt in prompts]
        self.answers = {} if answers is None else one_answer_each(keys, texts, answers)
        self.conversations = {} if turns is None else dict(zip(keys, turns, strict=True))
        first = None if turns is None else turns[0]
        dry_run_rewards(
            self.reward_fn, self.args, self.tokenizer, keys[0], texts[0], answers, first
        )
        if labels is None:
            return
        if turns is None:
            whole = [f"{text} {label}" for text, label in zip(texts, labels, strict=True)]
            written = TextBatch(whole, texts, answers)
        else:
            written = TextBatch.in_chat(turns, labels, answers)
        rewards = score_batch(self.reward_fn, written).rewards.tolist()
        earned: dict[Prompt, list[float]] = {}
        for key, reward in zip(keys, rewards, strict=True):
            earned.setdefault(key, []).append(reward)
        self.label_rewards = {prompt: statistics.mean(of) for prompt, of in earned.items()}

    def penalize(
        self, samples: Samples, rewards: Float[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Rewards in the reward function's own unit, less what the responses' lengths cost.

        1. `reward_penalty` takes the place of the reward of responses that are too short
           (`min_response_length`) or did not end by themselves.
        2. Up to 1 is taken off responses that go into the last `overlong_buffer` tokens.
        """
        args, mask = self.args, samples.mask
        if args.penalize_no_eos or args.min_response_length:
            finished = None
            if args.penalize_no_eos:
                written = samples.tokens[:, samples.prefix_len :]
                finished = F.has_stop(written, self.stop_tokens, mask)
            flawed = F.flawed_responses(mask, finished, args.min_response_length)
            rewards = F.penalize_responses(rewards, flawed, args.reward_penalty)
        if args.overlong_buffer:
            rewards = rewards + F.overlong_penalty(mask, args.gen_len, args.overlong_buffer)
        return rewards

    def greedy_rewards(
        self, samples: Samples, moments: F.RunningMoments | None
    ) -> Float[Tensor, " batch"] | None:
        """What greedy decoding earns on the prompt of each row; None where no estimator asks.

        Args:
            moments: what the rewards of the samples were scaled by.
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
        """Go on from the moments of a phase that was learned from, if rewards are scaled."""
        self.moments = moments or self.moments
