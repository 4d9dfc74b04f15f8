"""Best-of-n sampling: the reward of the best of n responses, and the responses to tune on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from rich.progress import track
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import REWARDS, Grammar, best_of_n, build_graph, grammar_policy
from rlhf_lab.rewards import split_rewards
from rlhf_lab.training.prompts import deal
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.tuning import Examples

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

RESPONSES_AT_ONCE = 256  # sampled and scored together, about


@dataclass(frozen=True)
class Candidates:
    """Several responses to each prompt, with their rewards; `ended` is True after a stop token."""

    prompts: list[str]
    responses: list[list[str]]
    ended: Bool[Tensor, "prompts samples"]
    rewards: Float[Tensor, "prompts samples"]
    true_reward: Float[Tensor, "prompts samples"] | None

    def figures(self, n: int) -> dict[str, Any]:
        """Estimate the rewards of the best of n without bias from all responses.

        `reward` and `true_reward` are means over prompts, and `*_half` half of their 95%
        intervals; `kl_bound` is log n - (n - 1) / n, in nats per sequence.
        """
        numbers = {"n": n, "kl_bound": F.best_of_n_kl_bound(n)}
        for name, x in {"reward": self.rewards, "true_reward": self.true_reward}.items():
            if x is not None:
                best = F.best_of_n_mean(self.rewards, x, n)
                found = F.seed_interval(best, torch.zeros_like(best))  # Student's t
                half = math.inf if found.high is None else (found.high - found.value).item()
                numbers |= {name: found.value.item(), f"{name}_half": half}
        return numbers

    def chosen(self, n: int) -> Examples:
        """Return the best of the first n responses to each prompt, if it ended, for fine-tuning."""
        best = self.rewards[:, :n].argmax(1).tolist()
        kept = [i for i, j in enumerate(best) if self.ended[i, j]]
        if len(kept) < 2:
            raise ConfigError(
                f"Only {len(kept)} of {len(best)} chosen responses ended; fine-tuning needs 2. "
                "Increase gen_len or the number of prompts, or set stop_at_eos."
            )
        texts = [self.responses[i][best[i]] for i in kept]
        return Examples([self.prompts[i] for i in kept], texts)


def draw_candidates(
    trainer: "RLHFTrainer", n_prompts: int, samples: int, seed: int, show_progress: bool = False
) -> Candidates:
    """Sample responses to prompts in a seeded order; score each without penalties or scaling."""
    for name, reward in split_rewards(trainer.reward_fn).items():
        if getattr(reward, "whole_batch", False):
            raise ConfigError(f"The reward {name!r} depends on the whole batch. Choose another.")
    order, tokenizer = deal(len(trainer.prompts.tokens), 0, n_prompts, seed), trainer.tokenizer
    at_once = max(1, RESPONSES_AT_ONCE // samples)
    stops = trainer.sampling_spec.stops(tokenizer)
    responses, ended, rewards, true_reward = [], [], [], []
    for start in track(range(0, n_prompts, at_once), "sampling", disable=not show_progress):
        chosen = order[start : start + at_once]
        rows = [trainer.prompts.tokens[i] for i in chosen for _ in range(samples)]
        generator = phase_generator(seed, start, "best_of_n")
        drawn = trainer.sample(rows, generator, trainer.sampling_spec)
        texts, given = drawn.texts(tokenizer), drawn.prompt_texts(tokenizer)
        responses += [text.removeprefix(p) for text, p in zip(texts, given, strict=True)]
        ended.append(F.has_stop(drawn.tokens[:, drawn.prefix_len :], stops, drawn.mask).cpu())
        read = trainer.rewards.read
        rewards.append(read(trainer.reward_fn, drawn, texts).rewards.cpu())
        if trainer.true_reward_fn is not None:
            true_reward.append(read(trainer.true_reward_fn, drawn, texts).rewards.cpu())
    shape = n_prompts, samples
    return Candidates(
        prompts=[trainer.prompts.texts[i] for i in order],
        responses=[responses[i * samples : (i + 1) * samples] for i in range(n_prompts)],
        ended=torch.cat(ended).reshape(shape),
        rewards=torch.cat(rewards).reshape(shape),
        true_reward=torch.cat(true_reward).reshape(shape) if true_reward else None,
    )


def exact_figures(trainer: "RLHFTrainer", numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return exact rewards and KL of the best of n for whole reviews of Reel; {} for other runs."""
    args, spec = trainer.args, trainer.sampling_spec
    plain = spec.temperature == 1 and spec.top_k is None and spec.top_p is None
    is_whole = trainer.prompts.texts == ["this movie"] and spec.stop_at_eos and args.gen_len >= 26
    known = trainer.speaks_reel and args.reward_fn in REWARDS
    if not (trainer.starts_as_grammar and plain and is_whole and known) or args.reward_weights:
        return {}
    reference = grammar_policy(build_graph(Grammar()))
    names = "exact_reward", "exact_true_reward", "exact_kl"
    return {
        p.n: dict(zip(names, (p.proxy, p.true_reward, p.kl_per_sequence), strict=True))
        for p in best_of_n(reference, REWARDS[args.reward_fn], numbers)
    }
