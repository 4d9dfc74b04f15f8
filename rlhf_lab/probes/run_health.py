"""RunHealth: PPO's assumptions checked, and the effective price of KL."""

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.models.device import LOGPROB_ROUNDING, exact, where_exact
from rlhf_lab.probes.probe import RESAMPLES, Check, Observation, Probe, Record, interval_fields
from rlhf_lab.training import PhaseReport, Rollout

COPIED = "mean_reward reward_std true_reward kl_per_sequence entropy_per_token explained_variance "
COPIED += "clip_fraction grad_norm ratio_first_minibatch"
# tolerance of the first ratio: sampling and learning batch rows differently
RATIO_GAP = MappingProxyType(LOGPROB_ROUNDING | {"fp32": 1e-4})
FREE_KL = 1e-3  # effective beta up to which the optimum is not computed


def effective_beta(
    kl_coef: float, advantage_std: float, reward_std: float, args: RLHFArgs
) -> float:
    """Return the cost of one nat of KL in units of the raw reward, at the first step of a phase.

    Whitening divides advantages by sigma_A and normalization divides rewards by sigma_r. Clipping,
    the entropy bonus and the KL's gradient through the visited states are not counted.

    beta_eff = kl_coef sigma_A sigma_r
    """
    beta = kl_coef
    if args.normalize_advantages:
        beta *= advantage_std
    if args.normalize_reward:
        beta *= reward_std
    return beta


def token_intervals(rollout: Rollout) -> dict[str, Interval]:
    """Return explained variance and entropy per token, with their intervals over sequences."""
    mask = where_exact(rollout.samples.mask)
    returns, values = exact(rollout.returns), exact(rollout.samples.values)
    errors = returns - values
    per_token = (errors, errors.square(), returns, returns.square(), exact(rollout.entropy))
    sums = [F.zero_masked(x, mask).sum(1) for x in per_token]

    def statistics(means: Tensor) -> Tensor:
        error, error2, value, value2, entropy = (means[..., :5] / means[..., 5:]).unbind(-1)
        spread = value2 - value.square()
        left = (error2 - error.square()) / torch.where(spread > 1e-12, spread, torch.nan)
        return torch.stack([1 - left, entropy], -1)

    columns = torch.stack([*sums, mask.sum(1).double()], 1)
    found = bootstrap_means(columns, statistic=statistics, resamples=RESAMPLES)
    return {"explained_variance": found[0], "entropy_per_token": found[1]}


class RunHealth(Probe):
    """Metrics of a phase with intervals over sequences; on Reel and sums, the exact optimum.

    Without a KL penalty it is the best policy whose KL is at most the phase's. On sums the record
    also has the optimum at several betas, the answer key of the reward.

    Intervals of metrics that have one number per sequence are computed from samples.jsonl.

    Checks: before the first step the ratio is 1 (the policy that is trained is the one that
    sampled); the objective is the sum of its terms.
    """

    name = "run_health"
    question = "Is the run healthy, and how far is it from the best policy at its KL penalty?"
    caveat = "Optimum without entropy bonus, at the first step's beta_eff, or the KL if that is 0."
    exact_reward = True
    events = ("after_phase",)

    def observe(self, seen: Observation) -> Record:
        rollout: Rollout = seen.ctx.rollout
        report: PhaseReport = seen.ctx.report
        mask = rollout.samples.mask
        teaching = rollout.teaching  # what is left out of the whitening has no part in its scale
        whitened = mask if teaching is None else mask & teaching[:, None]
        advantage_std = F.masked_std(rollout.advantages, whitened).item()
        beta = effective_beta(report.kl_coef, advantage_std, report.reward_std, seen.args)
        values: dict[str, Any] = {name: getattr(report, name) for name in COPIED.split()}
        values |= {"advantage_std": advantage_std, "beta_eff": beta, "sequences": len(mask)}
        for name, interval in token_intervals(rollout).items():
            values |= interval_fields(name, interval, 6)
        if seen.truth is not None:
            values |= _optimum(beta, seen)
            if key := seen.truth.answer_key():
                values["answer_key"] = key
        return Record(values, checks=[lambda: _checks(report, seen.args.rounding)])


def _optimum(beta: float, seen: Observation) -> dict[str, float | None]:
    if not beta > FREE_KL or not math.isfinite(beta):
        best = seen.truth.best_at_kl(seen.ctx.report.kl_per_sequence)
        none = {"optimal_reward": None, "optimal_kl_per_sequence": None}
        return none | {"best_reward_at_kl": best.reward}
    point = seen.truth.optimum(beta)
    return {"optimal_reward": point.reward, "optimal_kl_per_sequence": point.kl_per_sequence}


def _checks(report: PhaseReport, precision: str) -> list[Check]:
    learning = report.learning
    terms = learning.clipped_surrogate - learning.value_loss
    gap = abs(learning.objective - (terms + learning.entropy_bonus - learning.kl_penalty))
    ratio_gap = abs(report.ratio_first_minibatch - 1)
    return [
        Check.at_most("the ratio is 1 before the first step", ratio_gap, RATIO_GAP[precision]),
        Check.at_most("the objective is the sum of its terms", gap, 1e-5),
    ]
