"""Checks of KLByPosition's record: its means against sampled tokens, fresh forwards and slots."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.reel_truth import ReelTruth
from tests.probes.audit.anew import (
    as_float64,
    as_rows_say,
    gap,
    relative_gap,
    rollout_anew,
    rounding,
)
from tests.probes.audit.intervals import check_widths
from tests.probes.audit.labels import check_slots

ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
}


def bind_kl_by_position(seen: Observation, record: Record, n: int) -> list[Check]:
    """Hold the stored means to the rows that they are means of, and their labels to the grammar.

    Args:
        n: the sequences that the estimators saw.
    """
    rollout, values = seen.ctx.rollout, record.values
    samples, mask = rollout.samples, rollout.samples.mask.cpu()
    by_position = _mean_of_columns(as_float64(rollout.kl), mask)
    counts = [sum(column) for column in zip(*mask.tolist(), strict=True)]
    checks = [
        Check.at_most("the stored KL is the batch's", gap(values["kl"], by_position), 2e-6),
        Check.at_most("tokens are counted", gap(values["tokens_at"], counts), 0),
        Check.at_most(
            "sequences are counted",
            gap(list(values["sequences"].values()), [len(mask), min(n, len(mask))]),
            0,
        ),
    ]
    if "kl_low" in values:
        ends = values["kl_low"], values["kl_high"]
        checks.append(check_widths("the KL", ends, as_float64(rollout.kl).numpy(), mask.numpy()))
    if as_rows_say(seen):
        now, before = rollout_anew(seen)
        rows = len(now.logits)
        miss = relative_gap(rollout.kl[:rows], now.kl(before), mask[:rows])
        checks.append(
            Check.at_most("the KL of the first rows is a fresh forward's", miss, 2 * rounding(seen))
        )
    if samples.support is None and not {"logprobs", "interventions"} & set(seen.custom_components):
        checks += _estimates(seen, record, n)
    if "slots" in values:
        checks += _labels(seen, record)
    return checks


def _mean_of_columns(x: Float[Tensor, "batch gen"], mask: Tensor) -> list[float]:
    """The mean of each column over the rows where the mask is True; 0 where it never is."""
    columns = [column[real] for column, real in zip(x.T, mask.T, strict=True)]
    return [column.mean().item() if len(column) else 0.0 for column in columns]


def _estimates(seen: Observation, record: Record, n: int) -> list[Check]:
    """k1, k2 and k3 from the sampler's own log-probs and the residuals that the rollout kept."""
    rollout, reference = seen.ctx.rollout, seen.ctx.reference
    samples = rollout.samples
    logits = reference.unembed(reference.ln_final(rollout.ref_residuals[:n]))
    logprobs = (as_float64(logits) / seen.args.temperature).log_softmax(-1)
    tokens = samples.tokens[:n, samples.prefix_len :].cpu().long()
    log_ratio = as_float64(samples.logprobs[:n]) - logprobs.gather(-1, tokens[..., None])[..., 0]
    mask, misses, checks = samples.mask[:n].cpu(), [], []
    for kind, estimate in ESTIMATES.items():
        per_token = estimate(log_ratio)
        if f"{kind}_low" in record.values:
            ends = record.values[f"{kind}_low"], record.values[f"{kind}_high"]
            numbers = per_token.numpy(), mask.numpy()
            checks.append(check_widths(kind, ends, *numbers, 10 * rounding(seen)))
        for t in range(mask.shape[1]):
            column = per_token[mask[:, t], t].numpy()
            mean = column.mean() if len(column) else 0.0
            var = column.var(ddof=1) if len(column) > 1 else 0.0
            size = max(1.0, abs(mean), var)
            misses += [abs(record.values[f"{kind}_mean"][t] - mean) / size]
            misses += [abs(record.values[f"{kind}_var"][t] - var) / size]
    worst = max(misses) if np.isfinite(misses).all() else float("nan")
    follow = Check.at_most("estimators follow from the sampled tokens", worst, 10 * rounding(seen))
    return [follow, *checks]


def _labels(seen: Observation, record: Record) -> list[Check]:
    """Slot names against the words that stand there; information against variances of values."""
    samples, truth = seen.ctx.rollout.samples, seen.truth
    first = samples.prefix_len
    settled = np.zeros(first + len(record.values["slots"]))
    found = information_of(truth)[: len(settled)]
    settled[: len(found)] = found
    miss = relative_gap(record.values["information"], torch.from_numpy(settled[first:]))
    return [
        check_slots(seen, record, first),
        Check.at_most("information is the growth of the values' variance", miss, 1e-7),
    ]


def information_of(truth: ReelTruth) -> Float[np.ndarray, " seq"]:
    """Var V(s_t) - Var V(s_t-1): by how much each token makes the exact value vary; 0 for <bos>.

    Values of a prefix are a martingale, so that the growth of their variance is the variance of
    their growth (Young 2026, arXiv 2603.04851).
    """
    occupancy = truth.policy.occupancy()
    seconds = [float(o @ v**2) for o, v in zip(occupancy, truth.state_values, strict=True)]
    return np.diff(seconds, prepend=seconds[0])
