"""Intervals of stored rows and samples, as fields NAME_low and NAME_high, and as brackets."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional import bootstrap_means
from rlhf_lab.probes import Run
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import SAMPLES, reading
from rlhf_lab.views.templates import formatted

# columns of samples whose means are metrics
MEANS = {"mean_reward": "reward"} | {x: x for x in ("true_reward", "kl_per_sequence")}


def mean_with_ends(rows: Float[Tensor, "*name n"]) -> tuple[Any, Any, Any]:
    """Return the mean of each row over its sequences, and the ends of its interval, or None."""
    interval = bootstrap_means(rows.movedim(-1, 0), resamples=RESAMPLES)
    ends = (interval.value * torch.nan if x is None else x for x in (interval.low, interval.high))
    known = lambda x: list(map(known, x)) if isinstance(x, list) else None if x != x else x
    return interval.value.tolist(), *(known(end.tolist()) for end in ends)


def sample_ends(run: Run) -> tuple[dict[int, dict[str, float | None]], int | None]:
    """Return ends of intervals by phase, as fields NAME_low and NAME_high, and their sample size.

    The number of samples is None if phases differ in it.
    """
    ends, counts, by_phase = {}, set(), {}
    with reading(run.path / SAMPLES):
        for sample in run.samples():
            by_phase.setdefault(sample["phase"], []).append(sample)
    for line in run.metrics():
        if samples := by_phase.get(line["phase"]):
            counts.add(len(samples))
            fields = ends.setdefault(line["phase"], {})
            for name, _, low, high in _intervals(run, samples, line):
                fields |= {f"{name}_low": low, f"{name}_high": high}
    return ends, counts.pop() if len(counts) == 1 else None


def final_metrics(run: Run) -> dict[str, str | float]:
    """Return the final metrics by name; those of unequal samples as text with intervals.

    The metrics are over several batches, of which the samples of one are stored: its intervals are
    moved to the metric, and narrowed by the root of the fraction of sequences that is stored.
    """
    final, done = dict(run.info.get("final") or {}), run.info.get("phases_done", 0)
    samples = [x for x in run.samples() if x["phase"] == done] if final else []
    narrower = (len(samples) / final["samples"]) ** 0.5 if samples else 1.0
    for name, mean, low, high in _intervals(run, samples, final):
        if low is not None and high - low > 1e-5 * abs(high):  # else all samples are equal
            ends = [final[name] + narrower * (end - mean) for end in (low, high)]
            final[name] = formatted(final[name], *ends)
    return final


def _intervals(run: Run, samples: list[dict[str, Any]], metrics: Mapping[str, Any]) -> list:
    """Return name, mean and ends of each of these metrics that is known of all samples."""
    means = [x for x in metrics if x.startswith(reward_metric("")) or x.endswith("_fraction")]
    fields = MEANS | {name: name.removesuffix("_fraction") for name in means}
    columns = {name: [x.get(field) for x in samples] for name, field in fields.items()}
    columns = {name: column for name, column in columns.items() if None not in column}
    if not samples or not columns:
        return []
    with reading(run.path / SAMPLES):
        rows = torch.tensor(list(columns.values()))
    return list(zip(columns, *mean_with_ends(rows), strict=True))
