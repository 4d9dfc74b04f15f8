"""Builder of lesson notebooks: the learner's and the solved one, from a master in solutions/.

A master is a percent-format script, `NN_NAME.py`, or `more/NAME.py` for an appendix. These are
replaced:

- `{minutes}` in text, by the minutes that the lesson takes.
- `# first cell`, in its own cell, by the set-up that all lessons share.
- `from MODULE import NAME  # exercise`, in its own cell, by a heading, the function as a stub (or
  whole, in the solution) and a call of `check`.
- `from MODULE import NAME  # given`, in its own cell, by the whole function in a folded cell.
- `{lesson:NAME}` in text, by a link to the lesson with its number.
- `# expected`, as a code cell's first line, by its stored outputs in a fold below the cell.
- `GUESS = VALUE  # predict: CHOICES` by a call of `predictions.guess`, without the value for the
  learner. CHOICES are literals (`"up" or "down"`), numbers (`a number from 0 to 6`), or
  `in words`.
"""

import os
import re
from importlib import import_module
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from rlhf_lab import __version__
from rlhf_lab.course.display import dots
from rlhf_lab.course.exercise import Exercise, find_exercise
from rlhf_lab.errors import LoadError
from tools.course.prose import COLOR
from tools.course.runner import METADATA, execute
from tools.course.size import FUNCTION, PREDICTION, lesson_name, lesson_size, stored_cells
from tools.course.stub import bound_names, function_source, stub_source

FOLDED = {"jupyter": {"source_hidden": True}, "tags": ["given"]}  # metadata of a cell
MARKED = re.compile(r"#\s*predict:")
LITERAL = re.compile(r'"[^"]*"|-?\d+(?:\.\d+)?')
LINK = re.compile(r"\{([Ll]esson):(\w+)\}")
EXPECTED = "# expected\n"
FOLD = "<details><summary>Expected output</summary>\n\n{}\n\n</details>"
MAP = "notebooks/README.md"
ROW = re.compile(r"^(\| \[\d\d [^]]+\]\((\w+)\.ipynb\) \|.*\| )\d+ \|$", re.MULTILINE)
RANGE = re.compile(r"a number from (\d+) to (\d+)")
SET_UP = re.compile(r"^SETTINGS = ", re.MULTILINE)
LINE_LENGTH = 100
# sets one thread, and finds the package in a clone or installed; PyPI does not have it
MARK = "# first cell"
SOURCE = """\
import importlib.util
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # bars without ipywidgets
warnings.filterwarnings("ignore", message="Using a non-tuple sequence")  # how eindex picks entries
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small are not faster with more threads
if Path("../rlhf_lab/__init__.py").is_file():
    sys.path.insert(0, str(Path("..").resolve()))  # a clone, installed or not
elif importlib.util.find_spec("rlhf_lab") is None:
    raise ModuleNotFoundError(
        "rlhf_lab is not installed. Run `pip install -e .` in a clone of rlhf_lab, or "
        "`pip install path/to/rlhf_lab-{version}-py3-none-any.whl`. Then restart the kernel."
    )
"""
FIRST_CELL = SOURCE.format(version=__version__).strip()


def masters(root: Path) -> list[Path]:
    """List the masters of a repository: lessons in order, then appendices."""
    folder = root / "solutions"
    found = [*sorted(folder.glob("*.py")), *sorted(folder.glob("more/*.py"))]
    if not found:
        raise LoadError(f"{folder} has no lesson. Run this in the root, or set --root.")
    return found


def notebook_path(master: Path, root: Path, folder: str) -> Path:
    """Return the path of a lesson's notebook in `notebooks` or `solutions`."""
    return root / folder / master.relative_to(root / "solutions").with_suffix(".ipynb")


def build_lesson(master: Path, root: Path, again: bool = False) -> tuple[list[Path], bool]:
    """Write both notebooks of a lesson; returns those that changed, and True if it was executed.

    The solution is executed if its code has changed, or with `again`.
    """
    learner, solved = (notebook_path(master, root, name) for name in ("notebooks", "solutions"))
    before = [path.exists() and path.read_bytes() for path in (learner, solved)]
    solution = solution_notebook(master)
    is_stale = again or not same_code(solution, solved)
    if is_stale:  # first, since minutes and folds are computed from its outputs
        write(execute(solution, master.stem), solved)
        solution = solution_notebook(master)
    _keep_outputs(solution, solved)
    write(solution, solved)
    write(learner_notebook(master), learner)
    pairs = zip(before, (learner, solved), strict=True)
    return [path for old, path in pairs if path.read_bytes() != old], is_stale


def map_text(root: Path) -> str:
    """Return notebooks/README.md with the present minutes of its lessons, and their sums."""
    known, total = {path.stem: path for path in masters(root)}, 0

    def row(found: re.Match[str]) -> str:
        nonlocal total
        minutes = lesson_size(known[found[2]])["minutes"]
        total += minutes
        return f"{found[1]}{minutes} |"

    sections = re.split(r"(?=^## )", (root / MAP).read_text(encoding="utf-8"), flags=re.MULTILINE)
    with_minutes = (ROW.sub(row, section) for section in sections)
    hours = r"about [\d.]+ hours"  # of all lessons up to here
    return "".join(re.sub(hours, f"about {round(total / 30) / 2:g} hours", x) for x in with_minutes)


def learner_notebook(master: Path) -> NotebookNode:
    """Make the notebook with stubs, without predictions and outputs."""
    return _notebook(master, solved=False)


def solution_notebook(master: Path) -> NotebookNode:
    """Make the notebook with the sources of the functions, without outputs."""
    return _notebook(master, solved=True)


def _notebook(master: Path, solved: bool) -> NotebookNode:
    cells: list[NotebookNode] = []
    minutes = lesson_size(master)["minutes"]
    bound: set[str] = set()  # by the set-up, which is always run; later cells may be skipped
    is_set_up, expected = True, []
    for cell in jupytext.read(master, fmt="py:percent").cells:
        if cell.cell_type != "code":
            text = cell.source.replace("{minutes}", str(minutes))
            cells.append(new_markdown_cell(_with_links(text, master)))
        elif marked := _marked_function(cell.source, master):
            module, name, mark = marked
            if mark == "given":
                source = function_source(getattr(import_module(module), name), bound)
                cells.append(new_code_cell(source, metadata=FOLDED))
            else:
                cells += _exercise_cells(find_exercise(name), bound, solved)
            bound.add(name)  # later exercises use this function
        elif cell.source == MARK:
            up = "../.." if master.parent.name == "more" else ".."
            cells.append(new_code_cell(FIRST_CELL.replace("..", up)))
        else:
            source = cell.source.removeprefix(EXPECTED)
            expected += [len(cells)] * (source != cell.source)
            cells.append(new_code_cell(with_guesses(source, master, solved)))
            if is_set_up:
                bound |= bound_names(cell.source)
                is_set_up = not SET_UP.search(cell.source)
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number:03}"
    stored = {} if solved else stored_cells(master)
    for number in reversed(expected if stored else []):
        name = cells[number].id
        markdown = "\n\n".join(map(_as_markdown, stored[name].outputs))
        cells.insert(number + 1, new_markdown_cell(FOLD.format(markdown), id=f"{name}-expected"))
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA)


def _with_links(text: str, master: Path) -> str:
    solutions = master.parents[master.parent.name == "more"]
    known = {lesson_name(path): path for path in masters(solutions.parent)}

    def link(found: re.Match[str]) -> str:
        word, name = found.groups()
        if name not in known:
            raise LoadError(f"{master.name} links lesson {name!r}. Choose from {', '.join(known)}.")
        target, is_appendix = known[name].with_suffix(".ipynb"), known[name].stem == name
        label = f"more: {name.replace('_', ' ')}" if is_appendix else f"{word} {target.name[:2]}"
        return f"[{label}]({os.path.relpath(target, master.parent)})"

    return LINK.sub(link, text)


def _as_markdown(output: NotebookNode) -> str:
    data = output.get("data", {})
    html, text = data.get("text/html", "<pre"), data.get("text/plain", output.get("text", ""))
    lines = [line.rstrip() for line in COLOR.sub("", text).splitlines() if line.strip()]
    return "\n".join(["```text", *lines, "```"]) if html.startswith("<pre") else html


def with_guesses(source: str, master: Path, solved: bool) -> str:
    """Replace the predictions of a cell by calls of `predictions.guess`."""
    if len(MARKED.findall(source)) != len(PREDICTION.findall(source)):
        raise LoadError(
            f"{master.name} has a `# predict:` that does not follow `GUESS = VALUE` on one line. "
            "Write both on one line, with two spaces between them."
        )

    def call(line: re.Match[str]) -> str:
        name, value, choices = line.groups()
        start, value = f"{name} = predictions.guess(", value if solved else "..."
        if choices == "in words":
            return f"{start}{value})"
        among = f"among={_choices(choices, master)}"
        whole = f"{start}{value}, {among})"
        return whole if len(whole) <= LINE_LENGTH else f"{start}\n    {value},\n    {among},\n)"

    return PREDICTION.sub(call, source)


def _choices(text: str, master: Path) -> str:
    if numbers := RANGE.fullmatch(text):
        return f"range({numbers[1]}, {int(numbers[2]) + 1})"
    found = LITERAL.findall(text)
    if len(found) < 2 or re.sub(r"[\s,]|\bor\b", "", LITERAL.sub("", text)):
        raise LoadError(f"{master.name} has the choices {text!r}. Write literals, such as 1 or 2.")
    return f"[{', '.join(found)}]"


def _marked_function(source: str, master: Path) -> tuple[str, ...] | None:
    mark = re.search(r"# (?:exercise|given)\b", source)
    line = FUNCTION.fullmatch(source.strip())
    if mark and line is None:
        raise LoadError(
            f"{master.name} has a cell with `{mark[0]}` that is more than one line `from MODULE "
            f"import NAME  {mark[0]}`. Put this line into a separate cell."
        )
    return line and line.groups()


def _exercise_cells(exercise: Exercise, bound: set[str], solved: bool) -> list[NotebookNode]:
    heading = (
        f"### Exercise: `{exercise.name}`\n\n"
        f"difficulty {dots(exercise.difficulty)}, importance {dots(exercise.importance)}, "
        f"about {exercise.minutes} minutes; "
        f'stuck? run `hint("{exercise.name}")`'
    )
    source = function_source(exercise.reference, bound) if solved else stub_source(exercise, bound)
    check = f"check({exercise.name})"
    return [new_markdown_cell(heading), new_code_cell(source), new_code_cell(check)]


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def same_code(notebook: NotebookNode, path: Path) -> bool:
    """Return True if a file has the same code cells, with any outputs and texts."""
    if not path.exists():
        return False
    stored = nbformat.read(path, as_version=4)
    return [cell.source for cell in code_cells(stored)] == [c.source for c in code_cells(notebook)]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """List the code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _keep_outputs(notebook: NotebookNode, path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    for cell, executed in zip(code_cells(notebook), code_cells(stored), strict=True):
        cell.outputs = executed.outputs
    notebook.metadata = stored.metadata
