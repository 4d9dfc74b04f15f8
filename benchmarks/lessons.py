"""Times of the lessons in real Jupyter kernels, beside the seconds that they state for their cells.

python -m benchmarks.lessons
python -m benchmarks.lessons --only 08_watch_it_learn --times 5
"""

import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

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
OF_A_SECTION = re.compile(r"^\((\d+) s on one core\)$", re.MULTILINE)
OF_A_LESSON = re.compile(
    r"All cells together run in about (\d+) seconds on one core".replace(" ", r"\s+")
)
LONG = 3.0
"""Processor seconds from which a cell has to say how long it takes."""


class Seconds(NamedTuple):
    """What a code cell took: by the clock, and of the kernel's processor time."""

    clock: float
    processor: float


class Section(NamedTuple):
    """A text and the code cells below it, up to the next text."""

    text: NotebookNode
    code: list[int]

    @property
    def seconds_named(self) -> int | None:
        """What the text says that its cells take."""
        found = OF_A_SECTION.search(self.text.source)
        return int(found[1]) if found else None


def sections_of(notebook: NotebookNode) -> list[Section]:
    """The sections of a lesson; code above the first text belongs to none."""
    sections: list[Section] = []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            sections.append(Section(cell, []))
        elif sections:
            sections[-1].code.append(i)
    return sections


def seconds_named_of_all(notebook: NotebookNode) -> int | None:
    """What a lesson says that all its cells take."""
    found = OF_A_LESSON.search("\n".join(cell.source for cell in notebook.cells))
    return int(found[1]) if found else None


def now() -> Seconds:
    """The clock, and the processor time of this process's children, of which the kernel is one."""
    used = [child.cpu_times() for child in psutil.Process().children()]
    return Seconds(perf_counter(), sum(times.user + times.system for times in used))


def seconds_taken(notebook: NotebookNode) -> dict[int, Seconds]:
    """Run all cells in a fresh kernel; the seconds of each code cell by its number."""
    began, taken = {}, {}

    def start(cell: NotebookNode, cell_index: int) -> None:
        began[cell_index] = now()

    def end(cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        ended = now()
        taken[cell_index] = Seconds(*(b - a for a, b in zip(began[cell_index], ended, strict=True)))

    with tempfile.TemporaryDirectory() as place:
        run_cells(notebook, place, on_cell_execute=start, on_cell_executed=end)
    return taken


def rows_of(lesson: str, notebook: NotebookNode, rounds: list[dict[int, Seconds]]) -> list[list]:
    """One row for the lesson, one for each section that names its seconds or ought to."""

    def of(cells: Iterable[int]) -> list[float]:
        """Medians of what the cells take together, by the clock and by the processor."""
        sums = ([sum(taken[i][kind] for i in cells) for taken in rounds] for kind in (0, 1))
        return [float(median(column)) for column in sums]

    rows = [[lesson, "all", seconds_named_of_all(notebook) or "nothing", *of(rounds[0])]]
    for section in sections_of(notebook):
        longest = max((of([i])[1] for i in section.code), default=0.0)
        if section.seconds_named is not None or longest > LONG:
            named = section.seconds_named or "nothing"
            rows.append([lesson, section.text.id, named, *of(section.code)])
    return rows


def time_lessons(only: tuple[str, ...] = (), times: int = 3) -> int:
    """Run solved lessons in kernels of one thread, and compare seconds with what they say.

    Args:
        only: lessons, such as 00_start; else all.
        times: runs of each lesson, one round of all lessons after the other; the median counts.

    Raises:
        ConfigError: a lesson that is not there, or no runs.
    """
    there = sorted(path.stem for path in LESSONS.glob("*.ipynb"))
    for name in only:
        if name not in there:
            raise ConfigError(f"only={name!r} is no lesson; choose from {', '.join(there)}.")
    if times < 1:
        raise ConfigError(f"times={times} must be 1 or greater.")
    lessons = only or there
    notebooks = {name: nbformat.read(LESSONS / f"{name}.ipynb", as_version=4) for name in lessons}
    taken: dict[str, list[dict[int, Seconds]]] = {lesson: [] for lesson in lessons}
    for lesson in track([*lessons] * times, "running lessons", console=Console()):
        taken[lesson].append(seconds_taken(notebooks[lesson]))
    rows = [row for name in lessons for row in rows_of(name, notebooks[name], taken[name])]
    show_table(["lesson", "cells below", "says, s", "clock, s", "processor, s"], rows, digits=1)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(time_lessons, "benchmarks.lessons", arguments)


if __name__ == "__main__":
    sys.exit(main())
