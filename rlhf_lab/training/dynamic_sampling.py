"""Dynamic sampling (DAPO): replace prompts whose responses all have the same reward."""

import dataclasses
from itertools import islice
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.samples import Samples, join_samples
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


def informative_rollout_phase(trainer: "RLHFTrainer") -> Rollout:
    """Run a rollout phase that resamples up to `args.dynamic_sampling` times.

    Prompts whose responses all have the same raw reward (see `informative_groups`) are replaced by
    others, with new noise, until each is informative or the limit is reached. Penalties and clips
    do not count, as in the paper. Callbacks and reward moments do not see replaced samples. Prompts
    and noise depend on seed, phase and draw only.

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2, which draws without bound.
    """
    args, others = trainer.args, trainer.prompts.replacements_for(trainer.phase)
    samples, rewards, by_name = _sample_and_score(trainer, trainer.next_prompts())
    group = trainer.rewards.groups(samples)
    resampled_prompts, dull = 0, ~F.informative_groups(rewards, group)
    while resampled_prompts < args.dynamic_sampling and dull.any():
        resampled_prompts += 1
        prompts = islice(others, int(dull.sum()) // args.samples_per_prompt)
        rows = [prompt for prompt in prompts for _ in range(args.samples_per_prompt)]
        fresh, new_rewards, new_by_name = _sample_and_score(trainer, rows, resampled_prompts)
        order = torch.arange(len(dull), device=dull.device)
        order[dull] = len(dull) + torch.arange(len(rows), device=dull.device)
        samples = join_samples([samples, fresh], trainer.tokenizer.pad_token_id or 0)[order]
        rewards = rewards.masked_scatter(dull, new_rewards)
        by_name = {k: v.masked_scatter(dull, new_by_name[k]) for k, v in by_name.items()}
        dull = ~F.informative_groups(rewards, group)
    trainer.emit("after_rollout", samples=samples)
    changes = {"resampled_prompts": resampled_prompts, "rewards_by_name": by_name}
    rollout = dataclasses.replace(score_samples(trainer, samples, rewards), **changes)
    trainer.emit("after_score", samples=samples, rollout=rollout)
    return rollout


def _sample_and_score(
    trainer: "RLHFTrainer", prompts: list[list[int]], draw: int = 0
) -> tuple[Samples, Float[Tensor, " rows"], dict[str, Float[Tensor, " rows"]]]:
    generator = phase_generator(trainer.args.seed, trainer.phase, "sampling", draw)
    samples = trainer.sample(prompts, generator)
    output, device = trainer.rewards.read(trainer.reward_fn, samples), samples.tokens.device
    by_name = {name: rewards.to(device) for name, rewards in output.by_name.items()}
    return samples, output.rewards.to(device), by_name
