"""A phase's numbers under the names that TRL's PPOTrainer (0.7 to 0.11) gave to its statistics."""

import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.training.callbacks import Context
from rlhf_lab.training.overrides import Overrides
from rlhf_lab.training.ppo import ObjectiveTerms
from rlhf_lab.training.replay import ReplayMinibatch
from rlhf_lab.training.report import PhaseReport
from rlhf_lab.training.rollout import Rollout
from rlhf_lab.training.trainer import RLHFTrainer


def trl_stats(report: PhaseReport, args: RLHFArgs) -> dict[str, float]:
    """What TRL's `step` returned, as far as a report has it; `TRLStats` has the rest.

    Where the numbers differ: `objective/kl` is exact, nats per sequence (TRL: k1);
    `ppo/policy/approxkl` is k3 (TRL: k2); `ppo/loss/total` is minus the objective, entropy bonus
    and KL penalty included.
    """
    value_weight = args.vf_coef or 1.0
    return {
        "objective/kl": report.kl_per_sequence,
        "objective/kl_coef": report.kl_coef,
        "ppo/mean_scores": report.mean_reward,
        "ppo/std_scores": report.reward_std,
        "ppo/loss/policy": -report.clipped_surrogate,
        "ppo/loss/value": report.value_loss / value_weight,
        "ppo/loss/total": -report.objective,
        "ppo/policy/approxkl": report.approx_kl_per_token,
        "ppo/policy/clipfrac": report.clip_fraction,
        "ppo/policy/entropy": report.entropy_per_token,
        "ppo/val/var_explained": report.explained_variance,
        "ppo/learning_rate": report.base_lr,
        "tokens/responses_len_mean": report.response_length,
        "time/ppo/total": report.rollout_seconds + report.learning_seconds,
    }


class TRLStats:
    """Watches a trainer, and has each phase's statistics under TRL's names and as TRL defines them.

    Make it before the first `step`, and read `stats` after each. It looks at every minibatch on
    which a step is taken; nothing of the run changes.
    """

    def __init__(self, trainer: RLHFTrainer) -> None:
        self._functions = trainer.functions
        self._of_rollout: dict[str, float | Tensor] = {}
        self._updates: list[dict[str, Tensor]] = []
        self._stats: dict[str, float | Tensor] | None = None
        for event in ("after_score", "after_loss", "after_phase"):
            trainer.on(event)(self)

    @property
    def stats(self) -> dict[str, float | Tensor]:
        """Those of the last phase: numbers, and tensors where TRL has more than one.

        Raises:
            RunError: no phase has ended yet.
        """
        if self._stats is None:
            raise RunError("no phase has ended yet; read `stats` after a step or phase.")
        return dict(self._stats)

    def __call__(self, ctx: Context) -> None:
        """Take in the numbers of this event."""
        if ctx.event == "after_score":
            self._updates = []
            kl_coef = ctx.kl_coef if ctx.args.kl_in == "reward" else 0.0
            self._of_rollout = rollout_stats(ctx.rollout, ctx.args, self._functions, kl_coef)
        elif ctx.event == "after_loss":
            self._updates.append(update_stats(ctx.terms, ctx.minibatch, ctx.args))
        else:
            self._stats = (
                trl_stats(ctx.report, ctx.args)
                | self._of_rollout
                | mean_of_updates(self._updates)
                | {"time/ppo/optimize_step": ctx.report.learning_seconds}
            )


def rollout_stats(
    rollout: Rollout, args: RLHFArgs, functions: Overrides, kl_coef: float
) -> dict[str, float | Tensor]:
    """TRL's statistics of a batch before learning.

    1. KL: by the run's estimator if it has one, else exact; summed over each sequence.
    2. Entropy: minus the sum of a sequence's log-probs, which is its estimate from that sequence.
    3. Scores: as the advantages are computed from them; env/reward: as they were handed in.

    Args:
        kl_coef: the weight of the KL in the rewards.
    """
    samples, estimator = rollout.samples, functions.sampled_kl(args)
    mask, kl = samples.mask, F.zero_masked(rollout.kl, samples.mask)
    found: dict[str, Tensor] = {"objective/logprobs": F.zero_masked(samples.logprobs, mask)}
    if estimator is not None and rollout.ref_logprobs is not None:
        kl = F.kl_estimate(samples.logprobs, rollout.ref_logprobs, estimator, mask)
        found["objective/ref_logprobs"] = F.zero_masked(rollout.ref_logprobs, mask)
    found |= {
        "objective/kl": kl.sum(1).mean(),
        "objective/kl_dist": kl.sum(1),
        "objective/entropy": -found["objective/logprobs"].sum(1).mean(),
        "ppo/mean_non_score_reward": -kl_coef * F.masked_mean(kl, mask),
        "ppo/mean_scores": rollout.rewards.mean(),
        "ppo/std_scores": F.masked_std(rollout.rewards),
    }
    found |= _spread("env/reward", rollout.raw_rewards, "_")
    found |= _spread("tokens/queries", samples.prompt_mask.sum(1).float(), "_len_")
    found |= _spread("tokens/responses", mask.sum(1).float(), "_len_")
    return {name: _plain(value) for name, value in found.items()}


def update_stats(
    terms: ObjectiveTerms, minibatch: ReplayMinibatch, args: RLHFArgs
) -> dict[str, Tensor]:
    """TRL's statistics of one minibatch, before the step on it.

    Tensors of several numbers hold the minibatch's real tokens. The entropy is left out where the
    objective has none.
    """
    mask, old, new = minibatch.mask, minibatch.logprobs, terms.logprobs
    values, returns = F.zero_masked(terms.values, mask), F.zero_masked(minibatch.returns, mask)
    advantages = minibatch.advantages
    if args.normalize_advantages:
        advantages = minibatch.whitened_advantages()
    low, high = args.clip_coef, args.clip_coef_high or args.clip_coef
    clipped_low = F.clip_fraction_low(new, old, low, mask, advantages)
    value_clipped = values.new_zeros(())
    if args.vf_clip is not None:
        told = minibatch.returns, minibatch.values, args.vf_clip, mask
        value_clipped = F.value_clip_fraction(values, *told)
    found = {
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
        found["policy/entropy"] = terms.entropy_bonus / args.ent_coef
    return {f"ppo/{name}": value.detach() for name, value in found.items()}


def mean_of_updates(updates: list[dict[str, Tensor]]) -> dict[str, float | Tensor]:
    """Means over the minibatches; tensors of several numbers, one after the other.

    The explained variance is 1 - mean error / mean variance of the returns; 0 if that is 0.
    """
    if not updates:
        return {}
    columns = {name: [update[name] for update in updates] for name in updates[0]}
    found = {
        name: _plain(torch.stack(column).mean() if column[0].ndim == 0 else torch.cat(column))
        for name, column in columns.items()
    }
    error, variance = found["ppo/val/error"], found["ppo/returns/var"]
    return found | {"ppo/val/var_explained": 1 - error / variance if variance else 0.0}


def _spread(name: str, x: Tensor, infix: str) -> dict[str, Tensor]:
    """Mean, deviation and all values, under TRL's three names."""
    return {f"{name}{infix}mean": x.mean(), f"{name}{infix}std": F.masked_std(x), f"{name}_dist": x}


def _plain(value: Tensor) -> float | Tensor:
    """A number as a number, more than one as a tensor on the CPU."""
    return value.item() if value.ndim == 0 else value.detach().cpu()
