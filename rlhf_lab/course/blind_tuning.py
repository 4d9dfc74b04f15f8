"""Blind tuning: four fields of a run on a hidden reward, scored by its excess KL."""

import math

from rlhf_lab.console import print_line
from rlhf_lab.course.leaderboard import (
    TuningRow,
    add_to_leaderboard,
    plain_name,
    read_leaderboard,
)
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.course.tables import show_table
from rlhf_lab.course.tuned_run import (
    FRESH_REVIEWS,
    PRESET_FIELDS,
    REVIEWS,
    TRUE_REWARD_TO_REACH,
    UnfitFields,
    check_fields,
    hidden_reward,
    reference_policy,
    true_reward_frontier,
    tuned_figures,
)
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import excess_kl
from rlhf_lab.organism import REWARDS, FrontierPoint, frontier

LONGEST_NAME = 40


class BlindTuning:
    """A reward that stays hidden, and the leaderboard of the runs that were tuned for it.

    `tuning = BlindTuning("Ada")`, then as often as you like
    `tuning.run(kl_coef=0.1, base_lr=1e-3, total_phases=12, batch_size=128)`.

    Args:
        name: of the learner; the reward is drawn with it as the seed.

    Raises:
        UnfitFields: the name is empty, too long, or no text.
    """

    def __init__(self, name: object) -> None:
        if not isinstance(name, str) or not plain_name(name) or len(name) > LONGEST_NAME:
            raise UnfitFields(
                f"name is {name!r:.60}; give a text of 1 to {LONGEST_NAME} characters."
            )
        self.name = " ".join(name.split())
        self._hidden = hidden_reward(name)

    def run(
        self, *, kl_coef: object, base_lr: object, total_phases: object, batch_size: object
    ) -> TuningRow:
        """Train once, judge the policy on fresh reviews, and show the leaderboard with the row.

        1. Refuse fields that cannot be used, and more reviews than the budget has.
        2. Train on the hidden reward; judge the true reward, KL and `excess_kl` on `FRESH_REVIEWS`
           reviews.
        3. Put the row into the leaderboard: the same fields again take the place of their own row.

        Raises:
            UnfitFields: see above, or the run has broken down.
        """
        fields = {
            "kl_coef": kl_coef,
            "base_lr": base_lr,
            "total_phases": total_phases,
            "batch_size": batch_size,
        }
        check_fields(fields)
        fields |= {name: float(fields[name]) for name in ("kl_coef", "base_lr")}
        try:
            found = tuned_figures(self._hidden, fields)
        except (ConfigError, RunError) as error:
            raise UnfitFields(str(error)) from None
        row = TuningRow(name=self.name, **fields, **found)
        problem = add_to_leaderboard(row)
        if problem:
            print_line(problem)
        self.show(row)
        return row

    def rows(self) -> list[TuningRow]:
        """The runs of all learners whose hidden reward is the same one, the best first."""
        same = [row for row in read_leaderboard() if hidden_reward(row.name) == self._hidden]
        return sorted(same, key=place)

    def show(self, latest: TuningRow | None = None) -> None:
        """Print the leaderboard, the preset, and the exact optimum at the price of a run.

        Args:
            latest: a run that is marked, and shown even where it could not be saved.
        """
        rows = self.rows()
        if latest is not None and latest not in rows:
            rows = sorted([*rows, latest], key=place)
        lines = [_line(row, "> " * (row == latest) + row.name) for row in rows]
        seeds, presets = stored_figures("blind_tuning")["seeds"], _preset_rows(self._hidden)
        lines += [
            _line(row, f"preset, seed {seed}") for seed, row in zip(seeds, presets, strict=True)
        ]
        if latest is not None and latest.kl_coef > 0:
            best = frontier(reference_policy(), REWARDS[self._hidden], [latest.kl_coef])[0]
            lines.append(_optimum_line(best))
        names = ["name", "kl_coef", "base_lr", "phases", "reward", "true_reward", "KL", "excess KL"]
        show_table(names, lines)
        print_line(
            f"> this run; phases x batch, at most {REVIEWS:,}; true reward {TRUE_REWARD_TO_REACH} "
            "or more first, then by excess KL;",
            style="dim",
        )
        print_line(
            f"95 % intervals, bootstrap over n = {FRESH_REVIEWS} reviews that no run trained on",
            style="dim",
        )

    def is_above_preset(self, row: TuningRow) -> bool:
        """Whether a run stands above the preset's run of every stored seed."""
        return all(place(row) < place(preset) for preset in _preset_rows(self._hidden))

    def reveal(self) -> str:
        """The name of the hidden reward; ask for it when you are done."""
        return self._hidden


def place(row: TuningRow) -> tuple[bool, float]:
    """Sort rows: those that reach the true reward by their excess KL, then the others."""
    if row.true_reward >= TRUE_REWARD_TO_REACH:
        return False, math.inf if row.excess_kl is None else row.excess_kl
    return True, -row.true_reward


def _preset_rows(reward_fn: str) -> list[TuningRow]:
    """The stored runs of the preset's four fields on a reward, one per seed."""
    runs = stored_figures("blind_tuning")["runs"][reward_fn]
    return [TuningRow(name="preset reel", **PRESET_FIELDS, **found) for found in runs]


def _line(row: TuningRow, name: str) -> list[str]:
    """A run as a line of the table."""
    return [
        name,
        f"{row.kl_coef:g}",
        f"{row.base_lr:g}",
        f"{row.total_phases} x {row.batch_size}",
        f"{row.reward:.3f}",
        f"{row.true_reward:.3f} [{row.true_reward_low:.2f}, {row.true_reward_high:.2f}]",
        f"{row.kl:.3f}",
        _number_or_dash(row.excess_kl),
    ]


def _optimum_line(best: FrontierPoint) -> list[str]:
    """The exact optimum of the hidden reward at a price, as a line of the table."""
    figures = [f"{x:.3f}" for x in (best.proxy, best.true_reward, best.kl_per_sequence)]
    excess = excess_kl(best.true_reward, best.kl_per_sequence, *true_reward_frontier())
    return ["exact optimum", f"{best.beta:g}", "-", "-", *figures, _number_or_dash(excess)]


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"
