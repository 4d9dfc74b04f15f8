"""Checks of TextHeatmap's record: its columns against fresh forwards and a plain recursion."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.text_heatmap import credited_by_values
from tests.probes.audit.anew import (
    States,
    as_float64,
    as_rows_say,
    gap,
    off_mask,
    relative_gap,
    rollout_anew,
    rounding,
    value_rounding,
)
from tests.probes.audit.labels import check_tokens

TRUTH = ("true_value", "true_advantage")


def bind_text_heatmap(seen: Observation, record: Record) -> list[Check]:
    """Hold the stored tokens, columns and rewards to the samples that they are said to be of."""
    rollout, stored = seen.ctx.rollout, record.tensors
    samples, mask = rollout.samples, stored["mask"].cpu()
    n = len(mask)
    rewards = gap(record.values["rewards"], rollout.raw_rewards[:n])
    checks = [
        *check_tokens(seen, record, samples.tokens[:n], mask, "samples"),
        Check.at_most("the stored mask is the samples'", gap(mask, samples.mask[:n]), 0),
        Check.at_most("the stored rewards are the samples'", rewards, 1e-5),
        *_credit(seen, stored, mask),
        *_models(seen, stored, mask),
    ]
    if "true_value" in stored:
        checks += _truth(seen, stored)
    return checks


def _credit(seen: Observation, stored: dict[str, Tensor], mask: Bool[Tensor, "n gen"]) -> list:
    """Advantages and returns: the trainer's, and what a plain recursion makes of the values."""
    rollout, args, n = seen.ctx.rollout, seen.args, len(mask)
    checks = []
    for name, column in (("advantage", rollout.advantages), ("return", rollout.returns)):
        if name in stored:
            found = gap(stored[name], column[:n], mask)
            checks.append(Check.at_most(f"the stored {name}s are those that are learned", found, 0))
    if credited_by_values(seen) and {"advantage", "value"} <= stored.keys():
        lam = args.gae_lambda if args.advantages == "gae" else 0.0
        rewards, values = as_float64(rollout.rewards[:n]), as_float64(stored["value"])
        found = credit_backwards(values, rewards, mask, args.gamma, lam)
        miss = relative_gap(stored["advantage"], found, mask)
        checks.append(Check.at_most("advantages follow from the stored values", miss, 1e-4))
    return checks


def credit_backwards(
    values: Float[Tensor, "n gen"],
    rewards: Float[Tensor, " n"],
    mask: Bool[Tensor, "n gen"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "n gen"]:
    """Advantages by the recursion A_t = r_t + gamma V_t+1 - V_t + gamma lam A_t+1, row by row."""
    advantages = torch.zeros_like(values)
    for row, real in enumerate(mask):
        behind, later = None, 0.0
        for t in real.nonzero()[:, 0].flip(0).tolist():
            ahead = rewards[row] if behind is None else gamma * values[row, behind]
            later = ahead - values[row, t] + gamma * lam * later
            advantages[row, t], behind = later, t
    return advantages


def _models(seen: Observation, stored: dict[str, Tensor], mask: Bool[Tensor, "n gen"]) -> list:
    """Values, KL, entropy and log-ratios of the first rows, from fresh forwards of both models."""
    if not as_rows_say(seen):
        return []
    samples, (now, before) = seen.ctx.rollout.samples, rollout_anew(seen)
    rows = min(len(now.logits), len(mask))
    now, before = (
        States(each.logits[:rows], None if each.values is None else each.values[:rows])
        for each in (now, before)
    )
    chosen = samples.tokens[:rows, samples.prefix_len :]
    found = {
        "value": lambda: now.values,
        "kl": lambda: now.kl(before),
        "entropy": now.entropy,
        "log_ratio": lambda: now.logprobs(chosen) - before.logprobs(chosen),
    }
    if samples.support is not None:
        del found["log_ratio"]
    checks = []
    for name, column in found.items():
        if name in stored:
            allowed = value_rounding(seen) if name == "value" else 2 * rounding(seen)
            miss = relative_gap(stored[name][:rows], column(), mask[:rows])
            checks.append(Check.at_most(f"the stored {name} is a fresh forward's", miss, allowed))
    return checks


def _truth(seen: Observation, stored: dict[str, Tensor]) -> list[Check]:
    """Exact values and advantages: those of prefixes that end at the state itself."""
    samples, truth = seen.ctx.rollout.samples, seen.truth
    defined = stored["truth_mask"].cpu()
    values, advantages = (as_float64(stored[name]) for name in TRUTH)
    gen_len = defined.shape[1]
    miss = off_mask({"value": values, "advantage": advantages}, defined)
    for t in sorted({0, gen_len // 2, gen_len - 1}):
        end = samples.prefix_len + t
        before, known = truth.values(samples.tokens[: len(defined), :end])
        behind, reached = truth.values(samples.tokens[: len(defined), : end + 1])
        both = known[:, -1].cpu() & reached[:, -1].cpu()
        miss = max(miss, gap(defined[:, t], both))
        miss = max(miss, gap(values[:, t], before[:, -1], both))
        miss = max(miss, gap(advantages[:, t], behind[:, -1] - before[:, -1], both))
    return [Check.at_most("exact values are those of the prefixes", miss, 1e-5)]
