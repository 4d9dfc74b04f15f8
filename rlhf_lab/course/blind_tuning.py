"""Blind tuning: four fields of a run on a hidden reward, scored by its excess KL."""

import math

from rlhf_lab.console import print_line
from rlhf_lab.course.display import LessonError
from rlhf_lab.course.leaderboard import (
    TUNED_FIELDS,
    TuningRow,
    add_to_leaderboard,
    read_leaderboard,
)
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.course.tables import show_table
from rlhf_lab.course.tuned_run import (
    FRESH_REVIEWS,
    PRESET_FIELDS,
    REVIEWS,
    hidden_reward,
    reference_policy,
    true_reward_frontier,
    tuned_figures,
)
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import excess_kl
from rlhf_lab.organism import REWARDS, frontier

LONGEST_NAME = 40
TRUE_REWARD_TO_REACH = 0.9  # runs that reach it rank above those that do not


class BlindTuning:
    """A hidden reward, and the leaderboard of the runs that were tuned for it.

    `tuning = BlindTuning("Ada")`, then as often as you like
    `tuning.run(kl_coef=0.1, base_lr=1e-3, total_phases=12, batch_size=128)`.

    Args:
        name: the learner's; the seed with which the reward is drawn.

    Raises:
        LessonError: If the name is empty, too long, or not a string.
    """

    def __init__(self, name: object) -> None:
        if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
            raise LessonError(
                f"name must have 1 to {LONGEST_NAME} characters, got {name!r:.60}. Use your name."
            )
        self.name = " ".join(name.split())
        self._hidden = hidden_reward(name)

    def run(
        self, *, kl_coef: object, base_lr: object, total_phases: object, batch_size: object
    ) -> TuningRow:
        """Train once, evaluate the policy on fresh reviews, and show the leaderboard.

        The same fields again replace their own row.

        Raises:
            LessonError: If a field is invalid, the budget is exceeded, or training diverges.
        """
        values = (kl_coef, base_lr, total_phases, batch_size)
        try:
            if type(total_phases) is type(batch_size) is int:
                reviews = total_phases * batch_size
                if reviews > REVIEWS:
                    raise ConfigError(
                        f"total_phases * batch_size must be at most {REVIEWS}, got {reviews}. "
                        "Lower one of them."
                    )
            metrics = tuned_figures(self._hidden, dict(zip(TUNED_FIELDS, values, strict=True)))
        except (ConfigError, RunError) as error:
            raise LessonError(str(error)) from None
        row = TuningRow(self.name, float(kl_coef), float(base_lr), *values[2:], **metrics)
        problem = add_to_leaderboard(row)
        if problem:
            print_line(problem)
        self.show(row)
        return row

    def rows(self) -> list[TuningRow]:
        """Return the runs of all learners with the same hidden reward, best first."""
        same = [row for row in read_leaderboard() if hidden_reward(row.name) == self._hidden]
        return sorted(same, key=rank)

    def show(self, latest: TuningRow | None = None) -> None:
        """Print the leaderboard, the preset, and the exact optimum at the KL coefficient of a run.

        Args:
            latest: a run that is marked, and shown even if it could not be saved.
        """
        rows = self.rows()
        if latest is not None and latest not in rows:
            rows = sorted([*rows, latest], key=rank)
        lines = [_format_row(row, "> " * (row == latest) + row.name) for row in rows]
        seeds, presets = stored_figures("blind_tuning")["seeds"], _preset_rows(self._hidden)
        lines += [
            _format_row(row, f"preset, seed {seed}")
            for seed, row in zip(seeds, presets, strict=True)
        ]
        if latest is not None and latest.kl_coef > 0:
            best = frontier(reference_policy(), REWARDS[self._hidden], [latest.kl_coef])[0]
            excess = excess_kl(best.true_reward, best.kl_per_sequence, *true_reward_frontier())
            numbers = [f"{x:.3f}" for x in (best.proxy, best.true_reward, best.kl_per_sequence)]
            line = ["exact optimum", f"{best.beta:g}", "-", "-", *numbers, _format_excess(excess)]
            lines.append(line)
        names = ["name", "kl_coef", "base_lr", "phases", "reward", "true_reward", "KL", "excess KL"]
        show_table(names, lines)
        print_line(
            f"> this run; phases x batch, at most {REVIEWS:,}; true reward {TRUE_REWARD_TO_REACH} "
            "or more first, then by excess KL;\n"
            f"95 % intervals, bootstrap over n = {FRESH_REVIEWS} reviews that no run trained on",
            style="dim",
        )

    def is_above_preset(self, row: TuningRow) -> bool:
        """Return True if a run ranks above the preset's run of every stored seed."""
        return all(rank(row) < rank(preset) for preset in _preset_rows(self._hidden))

    def reveal(self) -> str:
        """Return the name of the hidden reward; call it when you are done."""
        return self._hidden


def rank(row: TuningRow) -> tuple[bool, float]:
    """Return a sort key: runs that reach the true reward by excess KL, then the others."""
    if row.true_reward >= TRUE_REWARD_TO_REACH:
        return False, math.inf if row.excess_kl is None else row.excess_kl
    return True, -row.true_reward


def _preset_rows(reward_fn: str) -> list[TuningRow]:
    runs = stored_figures("blind_tuning")["runs"][reward_fn]
    return [TuningRow(name="preset reel", **PRESET_FIELDS, **run) for run in runs]


def _format_row(row: TuningRow, name: str) -> list[str]:
    return [
        name,
        f"{row.kl_coef:g}",
        f"{row.base_lr:g}",
        f"{row.total_phases} x {row.batch_size}",
        f"{row.reward:.3f}",
        f"{row.true_reward:.3f} [{row.true_reward_low:.2f}, {row.true_reward_high:.2f}]",
        f"{row.kl:.3f}",
        _format_excess(row.excess_kl),
    ]


def _format_excess(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"
