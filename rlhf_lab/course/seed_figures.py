"""Figures of a lesson over several seeds: this run's next to stored ones of other seeds."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rlhf_lab.console import print_line
from rlhf_lab.course.tables import show_table
from rlhf_lab.probes.seeds import Spread

CLOSE = 0.005  # largest difference from the stored run of the same seed that is rounding


class SeedFigures:
    """Shows the figures of one run next to those of runs that differ only in the seed.

    `over_seeds = SeedFigures("what_rlhf_changed", SETTINGS)`, and in any later cell
    `over_seeds.compare("patched in", {"L0 mlp": 0.45})`. The stored ones ship with the package;
    `python -m tools.course record LESSON` runs the lesson once per seed, and writes them.

    Args:
        lesson: the name of its master, such as "what_rlhf_changed".
        settings: of the run, including `seed`; figures of other settings are not shown.
    """

    def __init__(self, lesson: str, settings: Mapping[str, Any]) -> None:
        self.tables: dict[str, dict[str, float]] = {}
        self._seed = settings.get("seed")
        self._settings = {name: value for name, value in settings.items() if name != "seed"}
        self._stored = stored_figures(lesson)

    def compare(
        self, table: str, figures: Mapping[str, float], digits: int = 3, largest: bool = True
    ) -> None:
        """Show this run's figures next to mean and range of the stored seeds.

        Args:
            largest: whether to show in how many seeds a row is the largest of its table.
        """
        self.tables[table] = {name: float(value) for name, value in figures.items()}
        stored = self._stored.get("tables", {}).get(table, {})
        if self._stored.get("settings") != self._settings or stored.keys() != figures.keys():
            show_table([table, "this run"], self.tables[table].items(), digits)
            print_line("no other seeds are stored for these settings", style="dim")
            return
        seeds, rows = self._stored["seeds"], []
        leaders = [max(stored, key=lambda name: stored[name][i]) for i in range(len(seeds))]
        for name, value in self.tables[table].items():
            spread = Spread(tuple(stored[name]))
            first = [f"{leaders.count(name)} of {len(seeds)}"] * largest
            rows.append([name, value, spread.mean, spread.low, spread.high, *first])
        headings = [table, "this run", f"mean of {len(seeds)} seeds", "lowest", "highest"]
        show_table([*headings, *["largest in"] * largest], rows, digits)
        if self._seed in seeds:
            i = seeds.index(self._seed)
            off = max(abs(self.tables[table][name] - stored[name][i]) for name in stored)
            if off > CLOSE:
                words = f"the stored run of seed {self._seed} differs from this one by up to"
                print_line(f"{words} {off:.3f}")


def stored_figures(record: str) -> dict[str, Any]:
    """Return the record of a lesson, or of runs that a lesson reads, or an empty dict."""
    file = files("rlhf_lab.course") / "records" / f"{record}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
