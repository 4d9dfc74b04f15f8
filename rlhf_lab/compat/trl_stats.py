"""Statistics of a phase under the names of TRL's PPOTrainer (0.7 to 0.11)."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.callbacks import Context
from rlhf_lab.training.ppo import ObjectiveTerms
from rlhf_lab.training.rollout import ReplayMinibatch, Rollout
from rlhf_lab.training.trainer import RLHFTrainer


class TRLStats:
    """Callback with each phase's statistics, named and defined as in TRL.

    Create it before the first `step`, and read `stats` after each: numbers, and tensors where TRL
    has several numbers. The run is not changed.
    """

    def __init__(self, trainer: RLHFTrainer) -> None:
        self._estimator = trainer.objective.kl_estimator
        self._rollout: dict[str, float | Tensor] = {}
        self._updates: list[dict[str, Tensor]] = []
        self.stats: dict[str, float | Tensor] = {}
        for event in ("after_score", "after_loss", "after_phase"):
            trainer.on(event)(self)

    def __call__(self, ctx: Context) -> None:
        """Collect the numbers of an event."""
        if ctx.event == "after_score":
            kl_coef = ctx.kl_coef if ctx.args.kl_in == "reward" else 0.0
            self._rollout = _rollout_stats(ctx.rollout, self._estimator, kl_coef)
            self._updates = []
        elif ctx.event == "after_loss":
            self._updates.append(_update_stats(ctx.terms, ctx.minibatch, ctx.args))
        else:
            updates = _average_updates(self._updates)
            report = {
                "objective/kl_coef": ctx.report.kl_coef,
                "ppo/policy/entropy": ctx.report.entropy_per_token,  # if no update computes it
                "ppo/learning_rate": ctx.report.base_lr,
                "tokens/responses_len_mean": ctx.report.response_length,
                "time/ppo/total": ctx.report.rollout_seconds + ctx.report.learning_seconds,
                "time/ppo/optimize_step": ctx.report.learning_seconds,
            }
            self.stats = report | self._rollout | updates


def _rollout_stats(
    rollout: Rollout, estimator: str | Callable[..., Tensor] | None, kl_coef: float
) -> dict[str, float | Tensor]:
    samples = rollout.samples
    mask, kl = samples.mask, F.zero_masked(rollout.kl, samples.mask)
    stats: dict[str, Tensor] = {"objective/logprobs": F.zero_masked(samples.logprobs, mask)}
    if estimator is not None and rollout.ref_logprobs is not None:
        kl = F.kl_estimate(samples.logprobs, rollout.ref_logprobs, estimator, mask)
        stats["objective/ref_logprobs"] = F.zero_masked(rollout.ref_logprobs, mask)
    stats |= {
        "objective/kl": kl.sum(1).mean(),
        "objective/kl_dist": kl.sum(1),
        "objective/entropy": -stats["objective/logprobs"].sum(1).mean(),
        "ppo/mean_non_score_reward": -kl_coef * F.masked_mean(kl, mask),
        "ppo/mean_scores": rollout.rewards.mean(),
        "ppo/std_scores": F.masked_std(rollout.rewards),
    }
    spreads = {
        ("env/reward", "_"): rollout.raw_rewards,
        ("tokens/queries", "_len_"): samples.prompt_mask.sum(1).float(),
        ("tokens/responses", "_len_"): mask.sum(1).float(),
    }
    for (name, infix), x in spreads.items():
        stats |= {f"{name}{infix}mean": x.mean(), f"{name}{infix}std": F.masked_std(x)}
        stats[f"{name}_dist"] = x
    return {name: _to_plain(value) for name, value in stats.items()}


def _update_stats(
    terms: ObjectiveTerms, minibatch: ReplayMinibatch, args: RLHFArgs
) -> dict[str, Tensor]:
    mask, old, new = minibatch.mask, minibatch.logprobs, terms.logprobs
    values, returns = F.zero_masked(terms.values, mask), F.zero_masked(minibatch.returns, mask)
    whiten = args.normalize_advantages
    advantages = minibatch.whitened_advantages() if whiten else minibatch.advantages
    low, high = args.clip_coef, args.clip_coef_high or args.clip_coef
    clipped_low = F.clip_fraction_low(new, old, low, mask, advantages)
    value_clipped = values.new_zeros(())
    if args.vf_clip is not None:
        value_clipped = F.value_clip_fraction(
            values, minibatch.returns, minibatch.values, args.vf_clip, mask
        )
    stats = {
        "loss/policy": -terms.clipped_surrogate,
        "loss/value": terms.value_loss / (args.vf_coef or 1.0),
        "loss/total": terms.value_loss - terms.clipped_surrogate,
        "policy/approxkl": F.masked_mean(F.kl_estimate(old, new, "k2", mask), mask),
        "policy/policykl": F.masked_mean(F.kl_estimate(old, new, "k1", mask), mask),
        "policy/clipfrac": clipped_low + F.clip_fraction_high(new, old, high, mask, advantages),
        "policy/advantages": advantages[mask],
        "policy/advantages_mean": F.masked_mean(advantages, mask),
        "policy/ratio": F.policy_ratio(new, old)[mask],
        "returns/mean": F.masked_mean(returns, mask),
        "returns/var": F.masked_var(returns, mask),
        "val/vpred": F.masked_mean(values, mask),
        "val/error": F.masked_mean((values - returns).square(), mask),
        "val/clipfrac": value_clipped,
        "val/mean": F.masked_mean(minibatch.values, mask),
        "val/var": F.masked_var(minibatch.values, mask),
    }
    if args.ent_coef:
        stats["policy/entropy"] = terms.entropy_bonus / args.ent_coef
    return {f"ppo/{name}": value.detach() for name, value in stats.items()}


def _average_updates(updates: list[dict[str, Tensor]]) -> dict[str, float | Tensor]:
    if not updates:
        return {}
    columns = {name: [update[name] for update in updates] for name in updates[0]}
    stats = {
        name: _to_plain(torch.stack(column).mean() if column[0].ndim == 0 else torch.cat(column))
        for name, column in columns.items()
    }
    error, variance = stats["ppo/val/error"], stats["ppo/returns/var"]
    return stats | {"ppo/val/var_explained": 1 - error / variance if variance else 0.0}


def _to_plain(value: Tensor) -> float | Tensor:
    return value.item() if value.ndim == 0 else value.detach().cpu()
