"""Blind tuning: four fields of a run on a hidden reward, scored by its excess KL."""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config.args import RLHFArgs
from rlhf_lab.config.presets import PRESETS
from rlhf_lab.console import print_line
from rlhf_lab.course.display import LessonError
from rlhf_lab.course.progress_file import progress_path, read_json, save_json
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.course.tables import show_table
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import bootstrap_interval, excess_kl
from rlhf_lab.organism import (
    REWARDS,
    Grammar,
    GraphPolicy,
    build_graph,
    frontier,
    grammar_policy,
    true_reward,
)
from rlhf_lab.training import RLHFTrainer

HIDDEN = ("bag_of_adjectives", "true_reward", "ignore_negation", "smoothed", "smoothed_popcorn")
REVIEWS = 1536  # the budget of total_phases times batch_size
FRESH_REVIEWS = 512  # on which the trained policy is evaluated
FRESH_SEED = 1000  # no run trains with it
TRUE_REWARD_TO_REACH = 0.9  # runs that reach it rank above those that do not
TUNING_SETTINGS: Mapping[str, Any] = {
    "preset": "reel",
    "num_minibatches": 4,
    "kl_in": "reward",
    "kl_estimator": "k1",
    "normalize_reward": False,
    "target_kl": 0.02,
}
# the four fields of the preset reel, with as many phases as the budget allows
PRESET_FIELDS: Mapping[str, Any] = {
    **{name: PRESETS["reel"][name] for name in ("kl_coef", "base_lr", "batch_size")},
    "total_phases": REVIEWS // PRESETS["reel"]["batch_size"],
}


@dataclass(frozen=True)
class TuningRow:
    """One run: its learner, its four fields, and its metrics on fresh reviews.

    Args:
        excess_kl: nats per review above the least KL with the same true reward; None if no policy
            of the frontier has this true reward.
    """

    name: str
    kl_coef: float
    base_lr: float
    total_phases: int
    batch_size: int
    reward: float
    true_reward: float
    true_reward_low: float
    true_reward_high: float
    kl: float
    excess_kl: float | None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: runs that reach the true reward by excess KL, then the others."""
        if self.true_reward >= TRUE_REWARD_TO_REACH:
            return False, math.inf if self.excess_kl is None else self.excess_kl
        return True, -self.true_reward

    def cells(self, mark: str = "") -> list[str]:
        """Format the row for the leaderboard."""
        return [
            mark + self.name,
            f"{self.kl_coef:g}",
            f"{self.base_lr:g}",
            f"{self.total_phases} x {self.batch_size}",
            f"{self.reward:.3f}",
            f"{self.true_reward:.3f} [{self.true_reward_low:.2f}, {self.true_reward_high:.2f}]",
            f"{self.kl:.3f}",
            "-" if self.excess_kl is None else f"{self.excess_kl:.3f}",
        ]


class BlindTuning:
    """A hidden reward, and the leaderboard of the runs that were tuned for it.

    `tuning = BlindTuning("Ada")`, then as often as you like
    `tuning.run(kl_coef=0.1, base_lr=1e-3, total_phases=12, batch_size=128)`.

    Args:
        name: name of the learner, which is also the seed of the reward.

    Raises:
        LessonError: If the name is empty.
    """

    def __init__(self, name: str) -> None:
        self.name = " ".join(str(name).split())
        if not self.name:
            raise LessonError("name is empty. Use your name.")
        self._hidden = hidden_reward(self.name)

    def run(
        self, *, kl_coef: float, base_lr: float, total_phases: int, batch_size: int
    ) -> TuningRow:
        """Train once, evaluate the policy on fresh reviews, and show the leaderboard.

        A run with the same fields replaces its row.

        Raises:
            LessonError: If a field is invalid, the budget is exceeded, or training diverges.
        """
        chosen = {"kl_coef": kl_coef, "base_lr": base_lr}
        chosen |= {"total_phases": total_phases, "batch_size": batch_size}
        try:
            RLHFArgs(**TUNING_SETTINGS, **chosen)  # names an invalid field
            if total_phases * batch_size > REVIEWS:
                raise ConfigError(
                    f"total_phases * batch_size must be at most {REVIEWS}, got "
                    f"{total_phases * batch_size}. Lower one of them."
                )
            metrics = tuned_figures(self._hidden, chosen)
        except (ConfigError, RunError) as error:
            raise LessonError(str(error)) from None
        row = TuningRow(self.name, **chosen, **metrics)
        add_to_leaderboard(row)
        self.show(row)
        return row

    def show(self, latest: TuningRow) -> None:
        """Print the leaderboard, the preset, and the exact optimum at the KL coefficient of a run.

        Args:
            latest: a run that is marked, and shown even if it could not be saved.
        """
        rows = [row for row in read_leaderboard() if hidden_reward(row.name) == self._hidden]
        rows += [latest] * (latest not in rows)
        rows.sort(key=lambda row: row.rank)
        lines = [row.cells("> " * (row == latest)) for row in rows]
        lines += [row.cells() for row in _preset_rows(self._hidden)]
        if latest.kl_coef > 0:
            best = frontier(reference_policy(), REWARDS[self._hidden], [latest.kl_coef])[0]
            excess = excess_kl(best.true_reward, best.kl_per_sequence, *true_reward_frontier())
            numbers = (best.proxy, best.true_reward, best.kl_per_sequence, excess)
            cells = ["-" if math.isnan(x) else f"{x:.3f}" for x in numbers]
            lines.append(["exact optimum", f"{best.beta:g}", "-", "-", *cells])
        names = ["name", "kl_coef", "base_lr", "phases", "reward", "true_reward", "KL", "excess KL"]
        show_table(names, lines)
        print_line(
            f"> this run; phases: total_phases x batch_size, at most {REVIEWS:,}; runs with a true "
            f"reward of at least {TRUE_REWARD_TO_REACH} come first, by excess KL;\n"
            f"95 % intervals, bootstrap over n = {FRESH_REVIEWS} reviews that no run trained on",
            style="dim",
        )

    def is_above_preset(self, row: TuningRow) -> bool:
        """Return True if a run ranks above the preset's run of every stored seed."""
        return all(row.rank < preset.rank for preset in _preset_rows(self._hidden))

    def reveal(self) -> str:
        """Return the name of the hidden reward; call it when you are done."""
        return self._hidden


def normalize_name(name: str) -> str:
    """Return a name in lower case with single spaces."""
    return " ".join(name.casefold().split())


def hidden_reward(name: str) -> str:
    """Choose one of `HIDDEN`, with a name as the seed: the same for each spelling of it."""
    return random.Random(normalize_name(name)).choice(HIDDEN)


def tuned_figures(reward_fn: str, chosen: Mapping[str, Any], seed: int = 1) -> dict[str, Any]:
    """Train once, and return reward, true reward with its interval, KL and excess KL."""
    settings = {**TUNING_SETTINGS, **chosen, "reward_fn": reward_fn, "seed": seed}
    trained = RLHFTrainer(RLHFArgs(**settings))
    trained.train()
    fresh = RLHFTrainer(
        RLHFArgs(**settings | {"batch_size": FRESH_REVIEWS, "seed": FRESH_SEED}),
        policy=trained.policy,
        reference=trained.reference,
    ).rollout_phase()
    true_rewards = true_reward(fresh.texts)
    interval = bootstrap_interval(true_rewards, resamples=400)
    kl = fresh.kl.sum(1).mean().item()
    excess = excess_kl(true_rewards.mean().item(), kl, *true_reward_frontier())
    return {
        "reward": fresh.raw_rewards.mean().item(),
        "true_reward": true_rewards.mean().item(),
        "true_reward_low": interval.low.item(),
        "true_reward_high": interval.high.item(),
        "kl": kl,
        "excess_kl": None if math.isnan(excess) else excess,
    }


def _preset_rows(reward_fn: str) -> list[TuningRow]:
    stored = stored_figures("blind_tuning")
    runs = zip(stored["seeds"], stored["runs"][reward_fn], strict=True)
    return [TuningRow(f"preset, seed {seed}", **PRESET_FIELDS, **run) for seed, run in runs]


def leaderboard_path() -> Path:
    """Return the path of the leaderboard, next to the progress file; it need not exist."""
    progress = progress_path()
    return progress.with_name(f"{progress.stem}.blind_tuning.json")


def read_leaderboard() -> list[TuningRow]:
    """Return all rows in the order in which they were added, without those of other fields."""
    names = {field.name for field in fields(TuningRow)}
    rows = read_json(leaderboard_path(), "rows", list)
    return [TuningRow(**row) for row in rows if isinstance(row, dict) and row.keys() == names]


def add_to_leaderboard(row: TuningRow) -> None:
    """Add a row, which replaces the one with the same key."""
    key = lambda x: (normalize_name(x.name), x.kl_coef, x.base_lr, x.total_phases, x.batch_size)
    rows = [other for other in read_leaderboard() if key(other) != key(row)] + [row]
    content = {"version": 1, "rows": [asdict(each) for each in rows]}
    save_json(leaderboard_path(), content, "the row")


@cache
def reference_policy() -> GraphPolicy:
    """Return the grammar as a policy."""
    return grammar_policy(build_graph(Grammar()))


@cache
def true_reward_frontier() -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """Return true reward and KL of the policies with the least KL, starting at the reference."""
    points = frontier(reference_policy(), true_reward, [1e4 * 0.8**k for k in range(70)])
    columns = zip(*((point.true_reward, point.kl_per_sequence) for point in points), strict=True)
    return tuple(torch.tensor(column, dtype=torch.float64) for column in columns)
