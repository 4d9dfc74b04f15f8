"""Checks of RunHealth's record: each figure counted again from the rollout and the report."""

import math

import numpy as np
from jaxtyping import Float, Shaped

from rlhf_lab.probes.probe import Check, Observation, Record
from tests.probes.audit.anew import as_float64

RESAMPLED = 100
"""Batches drawn anew: enough to tell an interval's width within a fifth."""
FEW = 16
"""Sequences below which a few resamples of a ratio lie so far out that widths differ by more."""


def bind_run_health(seen: Observation, record: Record) -> list[Check]:
    """Hold the stored figures to the batch, to the report, and to the optimum's free energy."""
    found, stored = _figures(seen), record.values
    checks = [
        Check.at_most(f"{name} is the batch's", _miss(stored[name], value), 1e-4)
        for name, value in found.items()
    ]
    n = len(seen.ctx.rollout.samples.mask)
    checks.append(Check.at_most("sequences are counted", abs(stored["sequences"] - n), 0))
    for name, found in _resampled(seen).items():
        if f"{name}_low" in stored and np.isfinite(found).all() and np.ptp(found) > 1e-5:
            width = float(np.diff(np.quantile(found, [0.025, 0.975]))[0])
            low, high = stored[f"{name}_low"], stored[f"{name}_high"]
            holds = low - 1e-5 <= np.median(found) <= high + 1e-5
            miss = abs(math.log2((high - low) / width)) if holds and high > low else math.inf
            allowed = 1 if n >= FEW else 2
            title = f"{name}'s interval is that of other resamples"
            checks.append(Check.at_most(title, miss, allowed))
    learned = seen.ctx.report.learning
    for name in ("clip_fraction", "grad_norm", "ratio_first_minibatch"):
        miss = _miss(stored[name], getattr(learned, name))
        checks.append(Check.at_most(f"{name} is the learning phase's", miss, 0))
    if stored.get("optimal_reward") is not None:
        checks.append(_free_energy(seen, record))
    return checks


def _miss(stored: float | None, found: float | None) -> float:
    """How far two numbers are apart, as a share of the second; 0 where neither is known."""
    if stored is None or found is None:
        return 0.0 if stored is found else math.nan
    return abs(stored - found) / max(1.0, abs(found))


def _figures(seen: Observation) -> dict[str, float | None]:
    """The figures of a rollout, from its tensors alone."""
    rollout, args = seen.ctx.rollout, seen.args
    real = rollout.samples.mask.cpu().numpy()
    rewards = as_float64(rollout.raw_rewards).numpy()
    kl, entropy = (
        np.where(real, as_float64(x).numpy(), 0.0) for x in (rollout.kl, rollout.entropy)
    )
    true_reward = rollout.true_rewards
    teaching = real
    if rollout.teaching is not None:
        teaching = real & rollout.teaching.cpu().numpy()[:, None]
    advantage_std = _std(as_float64(rollout.advantages).numpy()[teaching])
    beta = seen.ctx.report.kl_coef
    beta *= advantage_std if args.normalize_advantages else 1.0
    beta *= _std(rewards) if args.normalize_reward else 1.0
    returns = as_float64(rollout.returns).numpy()[real]
    errors = returns - as_float64(rollout.samples.values).numpy()[real]
    spread = returns.var(ddof=1) if len(returns) > 1 else 0.0
    found = {
        "mean_reward": rewards.mean(),
        "reward_std": _std(rewards),
        "true_reward": None if true_reward is None else as_float64(true_reward).mean().item(),
        "kl_per_sequence": kl.sum() / len(kl),
        "entropy_per_token": entropy.sum() / max(real.sum(), 1),
        "advantage_std": advantage_std,
        "beta_eff": beta,
    }
    if spread > 1e-6:
        found["explained_variance"] = 1 - errors.var(ddof=1) / spread
    return {name: value if value is None else float(value) for name, value in found.items()}


def _resampled(seen: Observation) -> dict[str, Float[np.ndarray, " resamples"]]:
    """Explained variance and entropy of batches drawn from this one, sequence by sequence."""
    rollout, draws = seen.ctx.rollout, np.random.default_rng(seen.ctx.phase)
    real = rollout.samples.mask.cpu().numpy()
    entropy, returns, values = (
        as_float64(x).numpy() for x in (rollout.entropy, rollout.returns, rollout.samples.values)
    )
    found: dict[str, list[float]] = {"entropy_per_token": [], "explained_variance": []}
    for _ in range(RESAMPLED):
        rows = draws.integers(len(real), size=len(real))
        there = real[rows]
        found["entropy_per_token"].append(float(entropy[rows][there].mean()))
        spread = returns[rows][there].var()
        left = (returns - values)[rows][there].var()
        found["explained_variance"].append(1 - left / spread if spread > 1e-6 else math.nan)
    return {name: np.array(numbers) for name, numbers in found.items()}


def _std(x: Shaped[np.ndarray, " n"]) -> float:
    """The root of the unbiased variance; 0 of one number, or of equal ones."""
    return float(x.std(ddof=1)) if len(x) > 1 and np.ptp(x) > 0 else 0.0


def _free_energy(seen: Observation, record: Record) -> Check:
    """E[r] - beta KL of the optimum is beta log E_ref[exp(r / beta)], which needs no optimum.

    (Korbak et al. 2022, arXiv 2205.11275)
    """
    rewards, chances = seen.truth.final_rewards
    beta, stored = record.values["beta_eff"], record.values
    free = _log_mean_exp(rewards / beta, chances) * beta
    miss = abs(stored["optimal_reward"] - beta * stored["optimal_kl_per_sequence"] - free)
    within = 0 <= stored["optimal_kl_per_sequence"] and rewards.min() <= stored["optimal_reward"]
    return Check.at_most("the optimum has its free energy", miss if within else math.nan, 1e-6)


def _log_mean_exp(x: Float[np.ndarray, " n"], weight: Float[np.ndarray, " n"]) -> float:
    top = x.max()
    return float(np.log(weight @ np.exp(x - top)) + top)
