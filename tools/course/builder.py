"""The notebook builder: from a lesson's master to the learner's notebook and the solved one.

A master is a percent-format script in solutions/. Three kinds of lines become something else:

- `# first cell`, alone in its cell, becomes the set-up that all lessons share (first_cell.py).
- `from MODULE import NAME  # exercise`, alone in its cell, becomes a heading, the function as a
  stub (or whole, in the solution) and a call of `check`.
- `GUESS = VALUE  # predict: CHOICES` becomes a call of `predictions.guess`, with the value left out
  for the learner. CHOICES are literals (`"up" or "down"`), numbers (`a number from 0 to 6`), or
  `in words`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from rlhf_lab.course.display import dots
from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.registry import find_exercise
from rlhf_lab.errors import LoadError
from tools.course.first_cell import MARK, first_cell
from tools.course.runner import KERNEL, execute
from tools.course.stub import bound_names, solution_source, stub_source

EXERCISE = re.compile(r"^from [\w.]+ import (\w+)  # exercise$", re.MULTILINE)
PREDICTION = re.compile(r"^(\w+) = (.+?)  # predict: (.+)$", re.MULTILINE)
MARKED = re.compile(r"#\s*predict:")
LITERAL = re.compile(r'"[^"]*"|-?\d+(?:\.\d+)?')
RANGE = re.compile(r"a number from (\d+) to (\d+)")
SET_UP = re.compile(r"^SETTINGS = ", re.MULTILINE)
LINE_LENGTH = 100


@dataclass(frozen=True)
class Built:
    """What became of a lesson: the files that changed, and whether the solution was executed."""

    lesson: str
    changed: tuple[Path, ...]
    executed: bool


def masters(root: Path) -> list[Path]:
    """The lesson masters below a repository's root, in order.

    Raises LoadError if there are none.
    """
    found = sorted((root / "solutions").glob("*.py"))
    if not found:
        raise LoadError(
            f"{root / 'solutions'} holds no lesson; run this in the repository's root, or name it "
            "with --root."
        )
    return found


def build_lesson(master: Path, root: Path, again: bool = False) -> Built:
    """Write both notebooks of a lesson; what is up to date is left as it is.

    1. Read the master, and make both notebooks of it.
    2. Write the learner's, without outputs.
    3. Execute the solution, if its code has changed or `again`, and write it; where the text alone
       has changed, the outputs stay.

    Raises LoadError if an exercise line or a cell's execution fails.
    """
    there = {name: root / name / f"{master.stem}.ipynb" for name in ("notebooks", "solutions")}
    changed = [there["notebooks"]] if write(learner_notebook(master), there["notebooks"]) else []
    solution = solution_notebook(master)
    stale = again or not same_code(solution, there["solutions"])
    made = execute(solution, master.stem) if stale else solution
    if not stale:
        keep_outputs(solution, there["solutions"])
    if write(made, there["solutions"]):
        changed.append(there["solutions"])
    return Built(master.stem, tuple(changed), stale)


def learner_notebook(master: Path) -> NotebookNode:
    """The notebook with stubs, without predictions and outputs."""
    return _notebook(master, solved=False)


def solution_notebook(master: Path) -> NotebookNode:
    """The notebook with the functions' sources, not executed yet."""
    return _notebook(master, solved=True)


def _notebook(master: Path, solved: bool) -> NotebookNode:
    read = jupytext.read(master, fmt="py:percent")
    cells: list[NotebookNode] = []
    bound: set[str] = set()  # by the set-up, which everybody runs; other cells may be skipped
    is_set_up = True
    for cell in read.cells:
        name = exercise_name(cell, master)
        if name:
            cells += _exercise_cells(find_exercise(name), bound, solved)
            bound.add(name)  # later exercises use the learner's own
        elif cell.cell_type == "code" and cell.source == MARK:
            cells.append(new_code_cell(first_cell()))
        elif cell.cell_type == "code":
            cells.append(new_code_cell(with_guesses(cell.source, master, solved)))
            if is_set_up:
                bound |= bound_names(cell.source)
                is_set_up = not SET_UP.search(cell.source)
        else:
            cells.append(new_markdown_cell(cell.source))
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number:03}"
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def with_guesses(source: str, master: Path, solved: bool) -> str:
    """A cell with its predictions as calls of `predictions.guess`.

    Raises LoadError for a prediction that is no line `GUESS = VALUE  # predict: CHOICES`, whose
    value would be left in, or for choices that cannot be read.
    """
    if len(MARKED.findall(source)) != len(PREDICTION.findall(source)):
        raise LoadError(
            f"{master.name} has a `# predict:` that is not behind `GUESS = VALUE` on one line; put "
            "it there, and two spaces before it."
        )

    def as_call(line: re.Match[str]) -> str:
        name, value, choices = line.groups()
        call, value = f"{name} = predictions.guess(", value if solved else "..."
        if choices == "in words":
            return f"{call}{value})"
        among = f"among={_choices(choices, master)}"
        whole = f"{call}{value}, {among})"
        if len(whole) <= LINE_LENGTH:
            return whole
        return f"{call}\n    {value},\n    {among},\n)"

    return PREDICTION.sub(as_call, source)


def _choices(words: str, master: Path) -> str:
    """What a prediction is one of, as Python."""
    numbers = RANGE.fullmatch(words)
    if numbers:
        return f"range({numbers[1]}, {int(numbers[2]) + 1})"
    found = LITERAL.findall(words)
    if len(found) < 2 or re.sub(r"[\s,]|\bor\b", "", LITERAL.sub("", words)):
        raise LoadError(f"{master.name} has the choices {words!r}; write literals, such as 1 or 2.")
    return f"[{', '.join(found)}]"


def exercise_name(cell: NotebookNode, master: Path) -> str | None:
    """The name in a cell's exercise line, or None.

    Raises LoadError if such a line has company in its cell, or names several things.
    """
    if cell.cell_type != "code" or not re.search(r"# exercise\b", cell.source):
        return None
    line = EXERCISE.fullmatch(cell.source.strip())
    if line is None:
        raise LoadError(
            f"{master.name} has a cell with `# exercise` that is more than one line `from MODULE "
            "import NAME  # exercise`; give the line a cell of its own."
        )
    return line[1]


def _exercise_cells(exercise: Exercise, bound: set[str], solved: bool) -> list[NotebookNode]:
    heading = (
        f"### Exercise: `{exercise.name}`\n\n"
        f"difficulty {dots(exercise.difficulty)}, about {exercise.minutes} minutes; "
        f'stuck? run `hint("{exercise.name}")`'
    )
    source = (solution_source if solved else stub_source)(exercise, bound)
    check = f"check({exercise.name})"
    return [new_markdown_cell(heading), new_code_cell(source), new_code_cell(check)]


def write(notebook: NotebookNode, path: Path) -> bool:
    """Write a notebook if the file does not hold it already; says whether it was written."""
    text = nbformat.writes(notebook) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def same_cells(notebook: NotebookNode, path: Path) -> bool:
    """Whether a file has the same cells, whatever their outputs."""
    if not path.exists():
        return False
    there = nbformat.read(path, as_version=4)
    return [(c.id, c.source) for c in there.cells] == [(c.id, c.source) for c in notebook.cells]


def same_code(notebook: NotebookNode, path: Path) -> bool:
    """Whether a file has the same code cells, whatever their outputs and the text between them."""
    if not path.exists():
        return False
    there = nbformat.read(path, as_version=4)
    return [cell.source for cell in code_of(there)] == [cell.source for cell in code_of(notebook)]


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def keep_outputs(notebook: NotebookNode, path: Path) -> None:
    """Give the code cells the outputs of those in a file, which has the same code, in place."""
    there = nbformat.read(path, as_version=4)
    for cell, executed in zip(code_of(notebook), code_of(there), strict=True):
        cell.outputs, cell.metadata = executed.outputs, executed.metadata
    notebook.metadata = there.metadata
