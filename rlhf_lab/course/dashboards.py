"""Dashboards of runs, healthy and broken: the numbers they show, and stored ones to learn from."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.training.report import PhaseReport

Dashboard = Mapping[str, Sequence[float]]  # numbers per phase by the name of the metric
# the name of each line, and its field of a report
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


def dashboard_of(reports: Sequence[PhaseReport]) -> dict[str, list[float]]:
    """Return every line of the dashboard, phase by phase."""
    return {name: [getattr(r, field) for r in reports] for name, field in COLUMNS.items()}


def stored_dashboards() -> dict[str, list[dict[str, list[float]]]]:
    """Return the dashboards of healthy and broken runs (tools.course.broken_runs), one per seed."""
    return stored_figures("dashboards")["runs"]
