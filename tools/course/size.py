"""Size of a lesson: its lines, words, predictions and figures, and the minutes that it takes."""

import re
from importlib import import_module
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from rlhf_lab.course.exercise import find_exercise
from rlhf_lab.course.mutants import dedented_source

FUNCTION = re.compile(r"from ([\w.]+) import (\w+)  # (exercise|given)")
PREDICTION = re.compile(r"^(\w+) = (.+?)  # predict: (.+)$", re.MULTILINE)
RULE = "───"  # below the headings of a table
# not counted as code that is given: imports, SETTINGS, docstrings, comments and magics
SKIPPED = re.compile(r'^from \S+ import \([^)]*\)|^SETTINGS = .*?\)$|^ +""".*?"""$', re.M | re.S)
LINE = re.compile(r"^ *(?!import |from |[#%!])\S", re.MULTILINE)


def lesson_name(master: Path) -> str:
    """Return the name of a lesson, which exercises and records use: the file's, without number."""
    return master.stem.lstrip("0123456789_")


def lesson_size(master: Path) -> dict[str, int]:
    """Measure a lesson from its master, and from the stored outputs of its solution.

    minutes = exercises' minutes + words / 200 + lines of given code / 20 + predictions
        + figures / 2, in steps of 5
    """
    text, words, code, minutes = master.read_text(encoding="utf-8"), 0, "", 0.0
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        if cell.cell_type != "code":
            words += len(cell.source.split())
        elif not (marked := FUNCTION.fullmatch(cell.source.strip())):
            code += cell.source + "\n"
        elif marked[3] == "exercise":
            minutes += find_exercise(marked[2]).minutes
        else:
            code += dedented_source(getattr(import_module(marked[1]), marked[2]))
    predictions = len(PREDICTION.findall(text))
    figures = sum(map(_figures, stored_cells(master).values()))
    minutes += words / 200 + len(LINE.findall(SKIPPED.sub("", code))) / 20
    minutes = 5 * round((minutes + predictions + figures / 2) / 5)
    counts = {"lines": len(text.splitlines()), "words": words, "predictions": predictions}
    return counts | {"figures": figures, "minutes": minutes}


def stored_cells(master: Path) -> dict[str, NotebookNode]:
    """Return the cells of a lesson's executed solution by id, if it exists."""
    path = master.with_suffix(".ipynb")
    return {c.id: c for c in nbformat.read(path, as_version=4).cells} if path.exists() else {}


def _figures(cell: NotebookNode) -> int:
    """Count tables and pictures, and colored texts once, except in checks."""
    data = [output.get("data", {}) for output in cell.get("outputs", [])]
    tags = [one.get("text/html", "")[:4] for one in data]
    tables = sum(RULE in one.get("text/plain", "") for one in data)
    is_check = cell.source.startswith("check(")
    return 0 if is_check else tables + tags.count("<img") + ("<div" in tags)
