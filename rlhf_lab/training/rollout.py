"""A rollout: a batch of samples with all that was computed about it, and its minibatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab import functional as F
from rlhf_lab.models import run_policy
from rlhf_lab.rewards.scoring import Scores
from rlhf_lab.samples import Rows, Samples, Support
from rlhf_lab.training.report import RolloutStats, reward_metric


@dataclass(frozen=True, kw_only=True)
class Rollout(Scores):
    """One batch of samples with everything that was computed about it before learning.

    Args:
        samples: tokens, masks, log-probabilities and values.
        kl: exact KL of the policy from the reference, in nats per token.
        entropy: of the policy, in nats per token.
        ref_residuals: the reference's final residual at the states before each generated token.
        advantages: of each generated token, before any whitening.
        returns: the value head's target.
        ref_logprobs: of the generated tokens under the reference, if the run estimates its KL from
            them; at the same temperature and truncation as the policy's.
        resampled_prompts: how often `dynamic_sampling` resampled prompts; None without it.

    `Scores` documents the other fields; the advantages were computed from `credit_rewards`.
    """

    samples: Samples
    kl: Float[Tensor, "batch gen"]
    entropy: Float[Tensor, "batch gen"]
    ref_residuals: Float[Tensor, "batch gen d_model"]
    advantages: Float[Tensor, "batch gen"]
    returns: Float[Tensor, "batch gen"]
    ref_logprobs: Float[Tensor, "batch gen"] | None = None
    resampled_prompts: int | None = None

    @cached_property
    def teaching(self) -> Bool[Tensor, " batch"] | None:
        """False if the advantages of all responses to a prompt are 0; None without groups."""
        if self.group is None or not self.compared:
            return None
        return F.teaching_groups(self.advantages, self.group)

    def to_tensordict(
        self, kl_coef: float = 0.0, stop_tokens: Sequence[int] = (), pad_token: int = 0
    ) -> Any:
        """Return the rollout as a TensorDict; see `compat.torchrl.to_tensordict`."""
        from rlhf_lab.compat.torchrl import to_tensordict

        return to_tensordict(self, kl_coef, stop_tokens, pad_token)


def summarize(rollout: Rollout) -> RolloutStats:
    """Return the statistics of a batch, read from the device at once."""
    mask = rollout.samples.mask
    found = {
        "mean_reward": rollout.raw_rewards.mean(),
        "reward_std": F.masked_std(rollout.raw_rewards),
        "kl_per_token": F.masked_mean(rollout.kl, mask),
        "kl_per_sequence": F.kl_per_sequence(rollout.kl, mask).mean(),
        "entropy_per_token": F.masked_mean(rollout.entropy, mask),
        "response_length": mask.float().sum(1).mean(),
        "explained_variance": F.explained_variance(rollout.samples.values, rollout.returns, mask),
    }
    engine_logprobs = rollout.samples.engine_logprobs
    if engine_logprobs is not None:
        logprobs = rollout.samples.logprobs
        mismatch = F.kl_estimate(engine_logprobs, logprobs, "k3", mask)
        found["engine_kl_per_token"] = F.masked_mean(mismatch, mask)
        size = F.effective_sample_size(logprobs, engine_logprobs, mask)
        found["effective_sample_fraction"] = size / mask.sum()
    if rollout.group is not None:
        informative = F.informative_groups(rollout.raw_rewards, rollout.group)
        found["uninformative_group_fraction"] = 1 - informative.float().mean()
    by_name = {name: rewards.mean() for name, rewards in rollout.rewards_by_name.items()}
    read = torch.stack([*found.values(), *by_name.values()]).tolist()
    numbers = dict(zip(found, read, strict=False))
    means = dict(zip(by_name, read[len(found) :], strict=True))
    return RolloutStats(
        true_reward=_mean(rollout.true_rewards),
        **_fractions(rollout),
        resampled_prompts=rollout.resampled_prompts,
        reward_means=means or None,
        **numbers,
    )


def mean_of_batches(rollouts: Sequence[Rollout]) -> dict[str, float | int | None]:
    """Return the results of an evaluation: means over batches, and the number of samples."""
    batches = [summarize(rollout) for rollout in rollouts]
    means = dict.fromkeys(("mean_reward", "true_reward")) | _fractions(*rollouts)
    for name in ("mean_reward", "true_reward", "kl_per_sequence"):
        values = [getattr(stats, name) for stats in batches]
        means[name] = None if None in values else sum(values) / len(values)
    for name in batches[0].reward_means or {}:
        of_batches = [stats.reward_means[name] for stats in batches]
        means[reward_metric(name)] = sum(of_batches) / len(of_batches)
    return means | {"samples": sum(len(rollout.texts) for rollout in rollouts)}


def sample_lines(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl; the KL is in nats, summed over each response."""
    samples, rewards = rollout.samples, rollout.raw_rewards
    kl = F.kl_per_sequence(rollout.kl, samples.mask).to(rewards)
    reward, kl, length = torch.stack([rewards, kl, samples.mask.sum(1).to(rewards)]).tolist()
    prompts, true_rewards = samples.prompt_texts(tokenizer), rollout.true_rewards
    columns = {
        "text": rollout.texts,
        "prompt": prompts,
        "response": [t.removeprefix(p) for t, p in zip(rollout.texts, prompts, strict=True)],
        "reward": reward,
        "true_reward": [None] * len(reward) if true_rewards is None else true_rewards.tolist(),
        "kl_per_sequence": kl,
        "response_length": map(round, length),
    } | {reward_metric(name): x.tolist() for name, x in rollout.rewards_by_name.items()}
    for name, x in rollout.text_metrics.items():
        columns[name] = [None if value != value else value for value in x.tolist()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _fractions(*rollouts: Rollout) -> dict[str, float | None]:
    found = {k: torch.cat([x.text_metrics[k] for x in rollouts]) for k in rollouts[0].text_metrics}
    return {f"{name}_fraction": _mean(x[~x.isnan()]) for name, x in found.items()}


def _mean(x: Tensor | None) -> float | None:
    return None if x is None or not len(x) else x.float().mean().item()


@dataclass(frozen=True)
class ReplayMinibatch(Rows):
    """Some sequences of a rollout, as inputs of the objective; see `Samples` and `Rollout`.

    `padded` is False if the attention mask hides nothing.
    """

    tokens: Int[Tensor, "minibatch seq"]
    attention_mask: Bool[Tensor, "minibatch seq"]
    mask: Bool[Tensor, "minibatch gen"]
    logprobs: Float[Tensor, "minibatch gen"]
    values: Float[Tensor, "minibatch gen"]
    advantages: Float[Tensor, "minibatch gen"]
    returns: Float[Tensor, "minibatch gen"]
    ref_residuals: Float[Tensor, "minibatch gen d_model"]
    support: Support | None
    ref_logprobs: Float[Tensor, "minibatch gen"] | None = None
    padded: bool = True
    teaching: Bool[Tensor, " minibatch"] | None = None
    engine_logprobs: Float[Tensor, "minibatch gen"] | None = None

    @property
    def prefix_len(self) -> int:
        """Prompt tokens per row, padding and BOS included."""
        return self.tokens.shape[1] - self.mask.shape[1]

    def whitened_advantages(self) -> Float[Tensor, "minibatch gen"]:
        """The advantages as the surrogate takes them with `normalize_advantages`."""
        return F.whiten_over_groups(self.advantages, self.mask, self.teaching)


@dataclass(frozen=True)
class ReplayMemory:
    """The rollout of one phase, split into shuffled minibatches.

    Args:
        rollout: what to learn from.
        num_minibatches: minibatches per pass; divides the batch.
        passes: number of passes over the batch.
    """

    rollout: Rollout
    num_minibatches: int
    passes: int

    def get_minibatches(self, generator: torch.Generator) -> Iterator[ReplayMinibatch]:
        """Split the batch into minibatches, `passes` times, each time in a new order.

        1. Draw an order of the sequences for each pass, by `torch.randperm(batch, generator=...)`.
        2. Cut it into `num_minibatches` equal runs of neighbors.
        3. Take these rows of every tensor.

        Args:
            generator: on the CPU, so the order is the same on every device.
        """
        batch, samples = len(self.rollout.texts), self.rollout.samples
        orders = [torch.randperm(batch, generator=generator) for _ in range(self.passes)]
        minibatches = torch.stack(orders).reshape(self.passes * self.num_minibatches, -1)
        padded = samples.is_padded
        for rows in minibatches.to(samples.tokens.device):
            yield self._take(rows, padded)

    def _take(self, rows: Int[Tensor, " rows"], padded: bool) -> ReplayMinibatch:
        samples, teaching = self.rollout.samples, self.rollout.teaching
        columns = vars(self.rollout) | vars(samples)
        columns |= {"attention_mask": samples.attention_mask, "teaching": teaching}
        names = [field.name for field in fields(ReplayMinibatch) if field.name != "padded"]
        taken = {name: None if columns[name] is None else columns[name][rows] for name in names}
        return ReplayMinibatch(**taken, padded=padded)


@torch.no_grad()
def score_tokens(
    trainer: Any,
    tokens: Int[Tensor, "batch seq"],
    prompt_mask: Bool[Tensor, "batch prefix"],
    mask: Bool[Tensor, "batch gen"],
    engine_logprobs: Float[Tensor, "batch gen"] | None = None,
) -> Samples:
    """Return given texts as samples, with the policy's log-probs and values."""
    zeros, policy = torch.zeros(mask.shape, device=mask.device), trainer.policy
    samples = Samples(tokens, prompt_mask, mask, zeros, zeros.clone(), None, None, engine_logprobs)
    for rows in torch.arange(len(mask), device=mask.device).split(trainer.args.rows_at_once):
        part = samples[rows]
        inputs = policy, part.tokens, part.prefix_len, trainer.args.temperature
        found = run_policy(*inputs, attention_mask=part.attention_mask, forward=trainer.forward)
        samples.logprobs[rows] = found.logprobs.masked_fill(~part.mask, 0.0)
        samples.values[rows] = found.values.masked_fill(~part.mask, 0.0)
    return samples
