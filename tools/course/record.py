"""Record of a lesson over seeds: run its cells once per seed, and store what they compare."""

import json
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from rlhf_lab.errors import ConfigError, LoadError
from tools.course.builder import SET_UP, code_cells, solution_notebook
from tools.course.runner import REAL_MODELS, run_lesson
from tools.course.size import lesson_name
from tools.course.stored_parts import RECORDS, write_parts

SEED = re.compile(r"\bseed=\d+")
COMPARES = "over_seeds.compare("
PRINTED = "figures of this seed: "
LAST_CELL = f"""\
import json
print({PRINTED!r} + json.dumps([SETTINGS, over_seeds.tables]))
"""


def record_lesson(master: Path, root: Path, seeds: int, real_models: bool = False) -> Path:
    """Run a lesson's solution with the seeds 1, 2, ..., and store what it compares."""
    if real_models and not os.environ.get(REAL_MODELS):
        raise ConfigError(f"{REAL_MODELS} is unset. Set it to the folder of the real models.")
    found = [run_seed(master, seed, real_models) for seed in range(1, seeds + 1)]
    (settings, tables), option = found[0], " --real-models" * real_models
    heading = {
        "made_by": f"python -m tools.course record {lesson_name(master)} --seeds {seeds}{option}",
        "made_on": platform.machine(),
        "settings": {name: value for name, value in settings.items() if name != "seed"},
        "seeds": list(range(1, seeds + 1)),
    }
    columns = {
        table: {name: [t[table][name] for _, t in found] for name in metrics}
        for table, metrics in tables.items()
    }
    path = root / RECORDS / f"{lesson_name(master)}{'_real' * real_models}.json"
    write_parts(path, heading, {"tables": lambda: columns}, (), 5)
    return path


def run_seed(master: Path, seed: int, real_models: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a lesson with a seed; returns its settings and tables."""
    notebook = with_seed(solution_notebook(master), seed, master.stem)
    with tempfile.TemporaryDirectory() as directory:
        done = run_lesson(notebook, directory, master.stem, real_models)
    text = "".join(output.get("text", "") for output in done.cells[-1].outputs)
    settings, tables = json.loads(text.split(PRINTED, 1)[1])
    return settings, tables


def with_seed(notebook: NotebookNode, seed: int, lesson: str) -> NotebookNode:
    """Change the seed of a solution, and keep its code up to the last comparison, without checks.

    A last cell prints settings and tables.
    """
    code = [cell for cell in code_cells(notebook) if not cell.source.startswith("check(")]
    comparing = [i for i, cell in enumerate(code) if COMPARES in cell.source]
    set_up = [cell for cell in code if SET_UP.search(cell.source)]
    if not comparing or len(set_up) != 1 or len(SEED.findall(set_up[0].source)) != 1:
        raise LoadError(
            f"lesson {lesson} has no figures over seeds. Write `seed=1` into its SETTINGS, and "
            f"call {COMPARES}...) in its cells."
        )
    set_up[0].source = SEED.sub(f"seed={seed}", set_up[0].source)
    notebook.cells = [*code[: comparing[-1] + 1], new_code_cell(LAST_CELL)]
    return notebook
