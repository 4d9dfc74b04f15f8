"""Best-of-n sampling: what the best of n answers earns, and the answers to fine-tune on."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from rich.progress import track
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import REWARDS, Grammar, best_of_n, build_graph, grammar_policy
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.rewards import split_rewards
from rlhf_lab.training.components import Parts
from rlhf_lab.training.prompts import deal
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.tuning import Examples

ANSWERS_AT_ONCE = 256
"""Answers that are sampled and judged at a time, about."""


@dataclass(frozen=True)
class BestOfNFigures:
    """What the best of n answers earns, over prompts.

    Args:
        reward, gold: the mean of what the best by the reward earns, and of its known truth.
        reward_half, gold_half: half of the 95 % interval around them, over the prompts' answers.
        kl_bound: log n - (n - 1) / n, in nats per sequence; the KL is at most that.
        exact_reward, exact_gold, exact_kl: of Reel's grammar, where they are known.
    """

    n: int
    reward: float
    reward_half: float
    gold: float | None
    gold_half: float | None
    kl_bound: float
    exact_reward: float | None = None
    exact_gold: float | None = None
    exact_kl: float | None = None

    def to_dict(self) -> dict[str, float | int | None]:
        """All fields as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Candidates:
    """Several answers to each of some prompts, judged.

    Args:
        prompts: the text of each; a prompt that was drawn twice stands there twice.
        responses: a list of answers to each.
        ended: whether each ended by itself.
    """

    prompts: list[str]
    responses: list[list[str]]
    ended: Bool[Tensor, "prompts samples"]
    rewards: Float[Tensor, "prompts samples"]
    gold: Float[Tensor, "prompts samples"] | None

    def figures(self, n: int) -> BestOfNFigures:
        """What the best of n of them earns, by the unbiased estimate over all of them."""
        reward, reward_half = mean_and_half(F.best_of_n_mean(self.rewards, self.rewards, n))
        gold, gold_half = None, None
        if self.gold is not None:
            gold, gold_half = mean_and_half(F.best_of_n_mean(self.rewards, self.gold, n))
        bound = F.best_of_n_kl_bound(n)
        return BestOfNFigures(n, reward, reward_half, gold, gold_half, bound)

    def chosen(self, n: int) -> Examples:
        """The best of the first n answers to each prompt, the earliest of several, to learn.

        Prompts whose best answer did not end by itself are left out: learning would have to end it.

        Raises:
            ConfigError: fewer than 2 are left.
        """
        best = self.rewards[:, :n].argmax(1).tolist()
        kept = [i for i, j in enumerate(best) if self.ended[i, j]]
        if len(kept) < 2:
            raise ConfigError(
                f"{len(kept)} of {len(best)} chosen answers ended by themselves, and 2 are needed "
                "to learn from; raise gen_len or the number of prompts, or set stop_at_eos."
            )
        texts = [self.responses[i][best[i]] for i in kept]
        return Examples([self.prompts[i] for i in kept], texts)


def mean_and_half(values: Float[Tensor, " prompts"]) -> tuple[float, float]:
    """The mean of independent values, and half of its 95 % interval, by Student's t."""
    count = len(values)
    mean = values.double().mean().item()
    if count < 2:
        return mean, math.inf
    return mean, student_t(count - 1) * values.double().std().item() / math.sqrt(count)


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to a hundredth from 4 degrees of freedom on.

    Source: the expansion of Abramowitz and Stegun 1964, 26.7.5.
    """
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def draw_candidates(
    parts: Parts, n_prompts: int, samples: int, seed: int, show_progress: bool = False
) -> Candidates:
    """Sample answers to prompts, and have the reward and the known truth judge each.

    1. Deal out the prompts in a seeded order, over and over.
    2. For some prompts at a time, sample their answers and judge them as they are: penalties and
       scaling, which are for learning, are not applied.

    Raises:
        ConfigError: the reward needs whole batches, or see `RewardPipeline.read`.
    """
    for name, reward in split_rewards(parts.reward_fn).items():
        if getattr(reward, "whole_batch", False):
            raise ConfigError(
                f"the reward {name!r} pays a text by its whole batch, and best-of-n compares the "
                "answers to one prompt; choose another."
            )
    order, tokenizer = deal(len(parts.prompts.tokens), 0, n_prompts, seed), parts.tokenizer
    at_once = max(1, ANSWERS_AT_ONCE // samples)
    starts = range(0, n_prompts, at_once)
    stops = parts.sampling_spec.stops(tokenizer)
    responses, ended, rewards, gold = [], [], [], []
    for start in track(starts, "sampling", disable=not show_progress):
        chosen = order[start : start + at_once]
        rows = [parts.prompts.tokens[i] for i in chosen for _ in range(samples)]
        generator = phase_generator(seed, start, "best_of_n")
        drawn = parts.sample(rows, generator, parts.sampling_spec)
        texts, given = drawn.texts(tokenizer), drawn.prompt_texts(tokenizer)
        responses += [text.removeprefix(p) for text, p in zip(texts, given, strict=True)]
        ended.append(F.has_stop(drawn.tokens[:, drawn.prefix_len :], stops, drawn.mask).cpu())
        rewards.append(parts.rewards.read(parts.reward_fn, drawn, texts).rewards.cpu())
        if parts.gold_fn is not None:
            gold.append(parts.rewards.read(parts.gold_fn, drawn, texts).rewards.cpu())
    shape = n_prompts, samples
    return Candidates(
        prompts=[parts.prompts.texts[i] for i in order],
        responses=[responses[i * samples : (i + 1) * samples] for i in range(n_prompts)],
        ended=torch.cat(ended).reshape(shape),
        rewards=torch.cat(rewards).reshape(shape),
        gold=torch.cat(gold).reshape(shape) if gold else None,
    )


def exact_figures(parts: Parts, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Reward, gold and KL of the best of n of Reel's grammar; empty where they are not known.

    The bundled models are a few hundredths of a nat away from the grammar. They are known for
    Reel's own rewards, where whole reviews are sampled as the model says.
    """
    args, spec = parts.args, parts.sampling_spec
    plain = spec.temperature == 1 and spec.top_k is None and spec.top_p is None
    is_whole = parts.prompts.texts == ["this movie"] and spec.stop_at_eos and args.gen_len >= 26
    known = args.base_model in BUNDLED and args.reward_fn in REWARDS
    if not (parts.starts_as_grammar and plain and is_whole and known) or args.reward_weights:
        return {}
    reference = grammar_policy(build_graph(Grammar()))
    points = best_of_n(reference, REWARDS[args.reward_fn], numbers)
    return {
        p.n: {"exact_reward": p.proxy, "exact_gold": p.gold, "exact_kl": p.kl_per_sequence}
        for p in points
    }
