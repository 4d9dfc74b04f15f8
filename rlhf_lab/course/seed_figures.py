"""Figures of a lesson over several seeds: this run's, beside those that are stored of others."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rlhf_lab.console import print_line
from rlhf_lab.course.tables import show_table
from rlhf_lab.probes.seeds import Spread

CLOSE = 0.005  # largest difference from the stored run of the same seed that is rounding


class SeedFigures:
    """Shows the figures of one run beside those of runs that differ in the seed alone.

    `over_seeds = SeedFigures("09_what_rlhf_changed", SETTINGS)`, and in any later cell
    `over_seeds.compare("patched in", {"L0 mlp": 0.45})`. The stored ones ship with the package;
    `python -m tools.course record LESSON` runs the lesson once per seed, and writes them.

    Args:
        lesson: the name of its master, such as "09_what_rlhf_changed".
        settings: of the run, `seed` among them; figures of other settings are not shown.
    """

    def __init__(self, lesson: str, settings: Mapping[str, Any]) -> None:
        self.tables: dict[str, dict[str, float]] = {}
        self._settings, self._stored = dict(settings), stored_figures(lesson)

    def compare(
        self, table: str, figures: Mapping[str, float], digits: int = 3, largest: bool = True
    ) -> None:
        """Show this run's figures next to mean and range of the stored seeds.

        Args:
            largest: whether to show in how many seeds a row is the largest of its table.
        """
        self.tables[table] = {name: float(value) for name, value in figures.items()}
        there = self._stored.get("tables", {}).get(table, {})
        if self._of_other_settings() or there.keys() != figures.keys():
            show_table([table, "this run"], self.tables[table].items(), digits)
            print_line("no other seeds are stored for these settings", style="dim")
            return
        seeds = self._stored["seeds"]
        leaders = [max(there, key=lambda name: there[name][i]) for i in range(len(seeds))]
        rows = []
        for name, value in self.tables[table].items():
            spread = Spread(tuple(there[name]))
            first = [f"{leaders.count(name)} of {len(seeds)}"] * largest
            rows.append([name, value, spread.mean, spread.low, spread.high, *first])
        headings = [table, "this run", f"mean of {len(seeds)} seeds", "lowest", "highest"]
        show_table([*headings, *["largest in"] * largest], rows, digits)
        self._tell_of_drift(table, there)

    def _of_other_settings(self) -> bool:
        own = {name: value for name, value in self._settings.items() if name != "seed"}
        return self._stored.get("settings") != own

    def _tell_of_drift(self, table: str, there: Mapping[str, list[float]]) -> None:
        seed = self._settings.get("seed")
        if seed not in self._stored["seeds"]:
            return
        column = self._stored["seeds"].index(seed)
        found = self.tables[table]
        off = max(abs(found[name] - values[column]) for name, values in there.items())
        if off > CLOSE:
            print_line(f"the stored run of seed {seed} differs from this one by up to {off:.3f}")


def stored_figures(record: str) -> dict[str, Any]:
    """What is stored under the name of a lesson, or of runs that a lesson reads; {} if nothing."""
    file = files("rlhf_lab.course") / "records" / f"{record}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
