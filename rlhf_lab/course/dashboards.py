"""Dashboards of runs, healthy and broken: the numbers they show, and stored ones to learn from."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.training.report import PhaseReport

Dashboard = Mapping[str, Sequence[float]]
"""A number for each phase, by the name of the metric."""
COLUMNS = MappingProxyType(
    {
        "reward": "mean_reward",
        "KL per sequence": "kl_per_sequence",
        "KL penalty": "kl_penalty",
        "entropy": "entropy_per_token",
        "explained variance": "explained_variance",
        "value loss": "value_loss",
        "first ratio": "ratio_first_minibatch",
        "clipped": "clip_fraction",
        "gradient norm": "grad_norm",
    }
)
"""What the lines of a dashboard are called, and which field of a report each is."""


def dashboard_of(reports: Sequence[PhaseReport]) -> dict[str, list[float]]:
    """Every line of the dashboard, phase by phase."""
    return {name: [getattr(r, field) for r in reports] for name, field in COLUMNS.items()}


def stored_dashboards() -> dict[str, list[dict[str, list[float]]]]:
    """Those of "healthy" runs and of each broken kind, one per seed, in the order of the seeds.

    `python -m tools.course.broken_runs` trains and writes them.
    """
    return stored_figures("dashboards")["runs"]
