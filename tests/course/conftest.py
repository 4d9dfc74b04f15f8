"""Keeps the tests' progress apart from the user's, and runs the cells of lessons."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.warm import WarmPython

RUN_CELLS = """
import json, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

import rlhf_lab

rlhf_lab.check_shapes = lambda: None  # this process began with the package imported
shell = InteractiveShell.instance()
shell.ast_node_interactivity = "none"
for number, cell in json.loads(Path(sys.argv[1]).read_text()):
    result = shell.run_cell(cell)
    if result.error_in_exec or result.error_before_exec:
        print("cell", number, "failed:", cell[:200])
        sys.exit(3)
"""


@pytest.fixture(autouse=True)
def progress_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The progress file of one test; panels are wide enough to read."""
    path = tmp_path / "progress" / "progress.json"
    monkeypatch.setenv("RLHF_LAB_PROGRESS", str(path))
    monkeypatch.setenv("COLUMNS", "140")
    return path


@pytest.fixture
def run_cells(
    warm_python: WarmPython, surroundings: dict[str, str]
) -> Callable[[list[tuple[int, str]], Path], str]:
    """Runs numbered cells one after the other in a fresh process, and returns what they print."""

    def run(cells: list[tuple[int, str]], place: Path) -> str:
        (place / "cells.json").write_text(json.dumps(cells), encoding="utf-8")
        files = {"RLHF_LAB_PROGRESS": "progress.json", "IPYTHONDIR": "ipython", "TMPDIR": ""}
        env = surroundings | {name: str(place / file) for name, file in files.items()}
        done = warm_python.run(["-c", RUN_CELLS, "cells.json"], cwd=place, env=env)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout + done.stderr

    return run
