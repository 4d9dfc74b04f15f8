"""Intervals on a page: of stored columns and samples, as whiskers, brackets and bands."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.probes import Run
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import SAMPLES, reading
from rlhf_lab.views.pictures import Ends

HOW = "95 %, bootstrap over sequences"
# the ends of intervals, by metric and phase
BandsByMetric = Mapping[str, Mapping[int, tuple[float | None, float | None]]]
TERM_TENSORS = {  # the column whose sum each term is, up to its coefficient
    "clipped_surrogate": "surrogate",
    "value_loss": "value_loss",
    "entropy_bonus": "entropy",
    "kl_penalty": "kl",
    "objective": "share",
}
METRIC_OF_COLUMN = {
    "reward": "mean_reward",
    "true_reward": "true_reward",
    "kl_per_sequence": "kl_per_sequence",
}


def mean_of_rows(rows: Float[Tensor, "*name n"]) -> Interval:
    """The mean of each row over its sequences, with its interval."""
    return bootstrap_means(rows.movedim(-1, 0), resamples=RESAMPLES)


def whisker_ends(interval: Interval) -> Ends:
    """The ends of several intervals; None where there is none."""
    missing = [None] * len(interval.value)
    if interval.low is None or interval.high is None:
        return missing, missing
    low, high = (
        [None if x != x else x for x in end.tolist()] for end in (interval.low, interval.high)
    )
    return low, high


def bracketed(value: float | None, low: float | None, high: float | None) -> str:
    """A number with its interval, as in `0.42 [0.31, 0.53]`; a dash for one that is not known."""
    if value is None:
        return "–"
    if low is None or high is None:
        return f"{value:.4g}"
    return f"{value:.4g} [{low:.3g}, {high:.3g}]"


def sample_bands(run: Run) -> tuple[BandsByMetric, int | None]:
    """The intervals of the metrics that are means over sequences, and over how many those are.

    1. Collect the rewards and KLs of the samples of each phase in metrics.jsonl.
    2. The grammatical fraction is a metric: it gives the number of grammatical samples.

    The number is None where phases differ in it. Runs of earlier versions have them as well.
    """
    metrics = {line["phase"]: line for line in run.metrics()}
    by_phase: dict[int, list[dict[str, Any]]] = {}
    for sample in run.samples():
        by_phase.setdefault(sample["phase"], []).append(sample)
    bands: dict[str, dict[int, tuple[float | None, float | None]]] = {}
    for phase, samples in by_phase.items():
        if phase in metrics:
            for name, _, *ends in _intervals(run, samples, metrics[phase]):
                bands.setdefault(name, {})[phase] = tuple(ends)
    counts = {len(by_phase[phase]) for phase in by_phase if phase in metrics}
    return bands, counts.pop() if len(counts) == 1 else None


def final_bands(run: Run) -> dict[str, tuple[float | None, float | None]]:
    """The intervals of the final figures, by name.

    The figures are over several batches, of which the samples of one are stored: its intervals are
    moved to the figure, and narrowed by the root of the fraction of sequences that is stored.
    """
    final = run.info.get("final") or {}
    samples = run.samples(run.info.get("phases_done", 0)) if final else []
    narrower = (len(samples) / final["samples"]) ** 0.5 if samples else 1.0
    return {
        name: tuple(None if end is None else final[name] + narrower * (end - mean) for end in pair)
        for name, mean, *pair in _intervals(run, samples, {})
    }


def _intervals(run: Run, samples: list[dict[str, Any]], metrics: Mapping[str, Any]) -> list[tuple]:
    """Name, mean and ends of each metric of a phase."""
    found = _columns(samples, metrics) if samples else {}
    if not found:
        return []
    with reading(run.path / SAMPLES):
        columns = torch.tensor(list(found.values())).T
    interval = bootstrap_means(columns, resamples=RESAMPLES)
    return list(zip(found, interval.value.tolist(), *whisker_ends(interval), strict=True))


def _columns(samples: list[dict[str, Any]], metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the value of each sample in each metric that is known of all samples."""
    rewards = {name: name for name in samples[0] if name.startswith(reward_metric(""))}
    columns = {
        metric: [sample.get(column) for sample in samples]
        for column, metric in (METRIC_OF_COLUMN | rewards).items()
    }
    share = metrics.get("grammatical_fraction")
    if share is not None:
        ones = round(share * len(samples))
        columns["grammatical_fraction"] = [1.0] * ones + [0.0] * (len(samples) - ones)
    return {name: column for name, column in columns.items() if None not in column}


def interval_of_terms(tensors: dict[str, Float[Tensor, "..."]], per_token: bool = True) -> Interval:
    """Return the terms of a step, sums of its columns, with intervals over sequences.

    1. Sum each column over the tokens of each sequence; draw sequences with replacement.
    2. A term is a mean over real tokens: multiply by real tokens / drawn tokens. If the objective
       averages over sequences, a term is the sum over the drawn sequences.
    """
    lengths = tensors["mask"].sum(1, keepdim=True)
    sums = torch.stack([tensors[column].sum(1) for column in TERM_TENSORS.values()], 1)
    n, tokens = len(lengths), lengths.sum().item()

    def total(means: Tensor, length: Tensor) -> Tensor:
        return means / length * tokens if per_token else means * n

    return bootstrap_means(sums, lengths, statistic=total, resamples=RESAMPLES)
