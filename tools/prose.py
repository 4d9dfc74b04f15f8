"""Lint of prose: names, links, quoted numbers and words in docs, lessons and docstrings.

`python -m tools.prose` prints each problem and returns 1 if there are any.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import nbformat
from beartype.door import is_bearable

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import Cost, LearningStats, PhaseReport, RolloutStats
from tools.course.builder import masters
from tools.course.prose import unsupported_numbers
from tools.course.size import lesson_name
from tools.reel.__main__ import main as reel
from tools.site.public import definitions

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "rlhf_lab"
OUTSIDE = "## What does not fit this lab"
COMMAND = "python -m "
PROGRAMS = {"rlhf_lab": parse, "tools.reel": reel}
GUIDES = ("from_trl", "from_arena", "from_torchtune", "from_torchrl", "from_openrlhf")
METRICS = {
    "## The phase": PhaseReport,
    "## The rollout": RolloutStats,
    "## Learning": LearningStats,
    "## Cost": Cost,
}
PARTS = {"rollout", "learning", "cost", "reward_means"}  # fields whose fields are on the page
FROM_ELSEWHERE = {  # numbers of a lesson's text that its cells do not print
    "start": ["900"],  # comparisons, in the cited paper
    "the_value_head": ["20"],  # phases of a suggestion to try
    "kl_placements": ["10,000", "640"],  # the setting's default, and a suggestion to try
}
PLOTS = ("bars", "curves", "heatmap", "heatmaps", "loop_diagram", "tokens_html", "color_key")
ROOMS = ("rlhf_lab", "benchmarks", "tools")
QUESTION = re.compile(r"(What|Who|Whether|How|Where|Which|From|One way|Small) ")


def page(name: str) -> str:
    """Return the text of a page in docs/."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of every table row, without headers and rules."""
    found = []
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        if line.startswith("|") and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) != columns:
                raise ValueError(f"A row has {len(cells)} cells instead of {columns}: {line}")
            found += [cells] if before.startswith("|") else []
    return found


def quoted(cell: str) -> list[str]:
    """Return the texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def resolve(path: str) -> Any:
    """Return the object of a dotted path below the package, for a dataclass field its declaration.

    Raises:
        ImportError, AttributeError: If it does not exist.
    """
    parts = path.split(".")
    found: Any = importlib.import_module("rlhf_lab")
    for i, part in enumerate(parts):
        declared = getattr(found, "__dataclass_fields__", {})
        if part in declared:
            found = declared[part]
            continue
        if not hasattr(found, part):
            importlib.import_module(".".join(["rlhf_lab", *parts[: i + 1]]))
        found = getattr(found, part)
    return found


def exists(name: str) -> bool:
    """Return True for a command with options, a field with a valid value, or a path."""
    if name.startswith(COMMAND):
        program, *words = name.removeprefix(COMMAND).split()
        options = {word for word in words if word.startswith("--")}
        command, printed = [word for word in words if word not in options], io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit, ConfigError):
            PROGRAMS[program]([*command, "--help"])
        usage = f"usage: {' '.join([program, *command])} "
        return usage in printed.getvalue() and options <= {*printed.getvalue().split()}
    if name.startswith("RLHFArgs."):
        field, _, value = name.removeprefix("RLHFArgs.").partition("=")
        hints = get_type_hints(RLHFArgs)
        return field in hints and (not value or is_bearable(ast.literal_eval(value), hints[field]))
    try:
        resolve(name)
    except (AttributeError, ImportError):
        return False
    return True


def missing_names(where: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each name that does not exist."""
    yield from (f"{where}: `{name}` does not exist" for name in names if not exists(name))


@functools.cache
def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def feature_problems() -> Iterator[str]:
    """Check that names in features.md exist, and a test in tests/features.txt for each row."""
    here, outside = page("features").split(OUTSIDE)
    text = (ROOT / "tests" / "features.txt").read_text(encoding="utf-8")
    tests = dict(re.findall(r"^(?!#)(.*) = (.*)$", text, re.MULTILINE))
    capabilities = {row[0].split(" (")[0] for row in rows(here, 2)}
    yield from (f"tests/features.txt: not as in the page: {x}" for x in capabilities ^ tests.keys())
    names = [name for row in rows(here, 2) for name in quoted(row[1]) or [f"of {row[0]}"]]
    names += [name for row in rows(outside, 3) for name in quoted(row[2])]
    for test in tests.values():
        path, function = test.split("::")
        if function not in _functions(ROOT / "tests" / path):
            yield f"tests/features.txt: the test {test} does not exist"
    yield from missing_names("docs/features.md", dict.fromkeys(names))


def guide_problems() -> Iterator[str]:
    """Check the names in the guides for users of other systems, and the linked lessons."""
    for guide in GUIDES:
        text = page(guide).split("## Names")[1].split("## Statistics")[0].split("## Numerical")[0]
        names = [name for row in rows(text, 3) for name in quoted(row[1])]
        yield from missing_names(f"docs/{guide}.md", dict.fromkeys(names))
    for number, heading, link in re.findall(r"\[(\d\d): ([^\]]+)\]\(([^)]+)\)", page("from_arena")):
        cells = json.loads((DOCS / link).read_text(encoding="utf-8"))["cells"]
        lines = "".join("".join(cell["source"]) + "\n" for cell in cells).splitlines()
        is_there = {f"## {heading}", f"### {heading}"} & {*lines}
        if not (is_there and Path(link).name.startswith(number)):
            yield f"docs/from_arena.md: {link} has no section '{heading}'"


def metric_problems() -> Iterator[str]:
    """Check that the tables of metrics.md have exactly the fields, and that functions exist."""
    for heading, owner in METRICS.items():
        table = rows(page("metrics").split(heading + "\n")[1].split("\n## ")[0], 3)
        found = {quoted(row[0])[0] for row in table}
        fields = {field.name for field in dataclasses.fields(owner)} - PARTS
        yield from (f"docs/metrics.md: {name} under {heading!r}" for name in found ^ fields)
        yield from missing_names("docs/metrics.md", [quoted(row[2])[0] for row in table])


def link_problems() -> Iterator[str]:
    """Check that linked files, and files of tests that are named, exist."""
    for path in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        linked = [path.parent / link for link in re.findall(r"\]\(([^)#:\s]+)", text)]
        linked += [ROOT / name for name in re.findall(r"`(tests/[^`:]+\.py)`", text)]
        yield from (f"{path.relative_to(ROOT)}: no {x}" for x in linked if not x.exists())


def lesson_problems() -> Iterator[str]:
    """Check that cells print the numbers of the text, and that plots are shown."""
    for master in masters(ROOT):
        notebook = nbformat.read(master.with_suffix(".ipynb"), as_version=4)
        printed_elsewhere = FROM_ELSEWHERE.get(lesson_name(master), [])
        for number in {*unsupported_numbers(notebook)} - {*printed_elsewhere}:
            yield f"{master.stem}: no cell prints {number}"
        for cell in notebook.cells:
            if cell.cell_type == "code":
                yield from (f"{master.stem}: not shown: {x}" for x in unseen_plots(cell.source))


def unseen_plots(source: str) -> list[str]:
    """Return the calls before a cell's last statement that return a plot without display."""
    statements = ast.parse(re.sub(r"^( *)%.*$", r"\1pass", source, flags=re.MULTILINE)).body
    alone = [s.value for s in statements[:-1] if isinstance(s, ast.Expr)]
    calls = [value for value in alone if isinstance(value, ast.Call)]
    return [ast.unparse(c)[:60] for c in calls if ast.unparse(c.func).split(".")[-1] in PLOTS]


def source_problems() -> Iterator[str]:
    """Check first lines and messages of modules, and that a public name is in one file only."""
    homes = defaultdict(set)
    for path in (p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        tree, where = ast.parse(path.read_text("utf-8")), path.relative_to(ROOT).as_posix()
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        if not re.match(r"[A-Z`].*[.]$", first) or QUESTION.match(first):
            yield f"{where}: the first line is not a plain sentence: {first!r}"
        if path.is_relative_to(PACKAGE):
            for name in definitions(tree):
                homes[name].add(where)
    for name, files in homes.items():
        if len(files) > 1 and not name.startswith("_"):
            yield f"{name} is defined in {', '.join(sorted(files))}"


CHECKS = (feature_problems, guide_problems, metric_problems, link_problems, lesson_problems)
CHECKS += (source_problems,)

if __name__ == "__main__":
    problems = [problem for check in CHECKS for problem in check()]
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))
