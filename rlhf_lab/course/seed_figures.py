"""Numbers of a lesson's run next to stored numbers of other seeds."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rlhf_lab.console import page_console, print_line
from rlhf_lab.views.dots import seed_dots

CLOSE = 0.005  # largest difference from the stored run of the same seed that is rounding


class SeedFigures:
    """Numbers of one run next to those of runs with other seeds.

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

    def compare(self, table: str, figures: Mapping[str, float], digits: int = 3) -> None:
        """Plot the numbers of this run as dots, next to the stored seeds."""
        self.tables[table] = {name: float(value) for name, value in figures.items()}
        stored = self._stored.get("tables", {}).get(table, {})
        is_same = self._stored.get("settings") == self._settings and stored.keys() == figures.keys()
        seeds = self._stored["seeds"] if is_same else []
        others = [i for i, seed in enumerate(seeds) if seed != self._seed]
        rows = {
            name: (value, [stored[name][i] for i in others])
            for name, value in self.tables[table].items()
        }
        picture = seed_dots(rows, table, digits)
        if page_console().is_jupyter:
            from IPython.display import display  # in every notebook, but not required

            display(picture)
        else:
            print_line(picture.alt)
        if not seeds:
            print_line("no other seeds are stored for these settings", style="dim")
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
