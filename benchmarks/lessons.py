"""Times of the lessons in real Jupyter kernels, next to the seconds that they state.

python -m benchmarks.lessons --only 08_watch_it_learn --times 5
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import nbformat
import psutil
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import track

from rlhf_lab.cli_runner import run_program
from rlhf_lab.course.tables import show_table
from rlhf_lab.errors import ConfigError
from tools.course.runner import run_cells

LESSONS = Path("solutions")
SECTION = re.compile(r"^\((\d+) s on one core\)$", re.MULTILINE)
LESSON = re.compile(
    r"All\s+cells\s+together\s+run\s+in\s+about\s+(\d+)\s+seconds\s+on\s+one\s+core"
)
LONG = 3.0  # CPU seconds of a cell whose section must state them


def stated_seconds(pattern: re.Pattern[str], text: str) -> int | None:
    """Return the seconds that a text states."""
    found = pattern.search(text)
    return int(found[1]) if found else None


def stated_total(notebook: NotebookNode) -> int | None:
    """Return the seconds that a lesson states for all its cells."""
    return stated_seconds(LESSON, "\n".join(cell.source for cell in notebook.cells))


def time_cells(notebook: NotebookNode) -> dict[int, float]:
    """Run all cells in a new kernel; returns the CPU seconds of each code cell."""
    start, spent = [0.0], {}

    def cpu_seconds() -> float:
        used = [child.cpu_times() for child in psutil.Process().children()]
        return sum(times.user + times.system for times in used)

    def begin(cell: NotebookNode, cell_index: int) -> None:
        start[0] = cpu_seconds()

    def end(cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        spent[cell_index] = cpu_seconds() - start[0]

    with tempfile.TemporaryDirectory() as directory:
        run_cells(notebook, directory, on_cell_execute=begin, on_cell_executed=end)
    return spent


def timing_rows(lesson: str, notebook: NotebookNode, rounds: list[dict[int, float]]) -> list[list]:
    """Make one row for the lesson, and one for each section that states its seconds or should."""
    spent = {i: median(one[i] for one in rounds) for i in rounds[0]}
    rows = [[lesson, "all", stated_total(notebook) or "none", sum(spent.values())]]
    texts = [i for i, cell in enumerate(notebook.cells) if cell.cell_type != "code"]
    for i, following in zip(texts, [*texts[1:], len(notebook.cells)], strict=True):
        seconds = [spent[k] for k in range(i + 1, following)]
        stated = stated_seconds(SECTION, notebook.cells[i].source)
        if stated is not None or max(seconds, default=0.0) > LONG:
            rows.append([lesson, notebook.cells[i].id, stated or "none", sum(seconds)])
    return rows


def time_lessons(only: tuple[str, ...] = (), times: int = 3) -> int:
    """Run solved lessons in kernels of one thread, and compare CPU seconds with stated ones.

    Args:
        only: names of lessons, such as 00_start; all by default.
        times: runs of each lesson; the median counts.
    """
    known = sorted(path.stem for path in LESSONS.glob("*.ipynb"))
    for name in only:
        if name not in known:
            raise ConfigError(f"Unknown only={name!r}. Choose from: {', '.join(known)}.")
    rows = []
    for name in track(only or known, "running lessons", console=Console()):
        notebook = nbformat.read(LESSONS / f"{name}.ipynb", as_version=4)
        rows += timing_rows(name, notebook, [time_cells(notebook) for _ in range(times)])
    show_table(["lesson", "cells below", "states, s", "CPU, s"], rows, digits=1)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(time_lessons, "benchmarks.lessons", arguments)


if __name__ == "__main__":
    sys.exit(main())
