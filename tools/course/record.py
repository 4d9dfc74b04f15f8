"""The recorder of seed figures: runs a lesson once per seed, and stores what its cells compared."""

import json
import os
import platform
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from rlhf_lab.errors import ConfigError, LoadError
from tools.course.builder import SET_UP, code_of, solution_notebook
from tools.course.runner import REAL_MODELS, run_lesson

RECORDS = Path("rlhf_lab", "course", "records")
SEED = re.compile(r"\bseed=\d+")
COMPARES = "over_seeds.compare("
PRINTED = "figures of this seed: "
LAST_CELL = f"""\
import json
print({PRINTED!r} + json.dumps([SETTINGS, over_seeds.tables]))
"""


def record_lesson(master: Path, root: Path, seeds: int, real_models: bool = False) -> Path:
    """Run a lesson's solution with the seeds 1, 2, ..., and store the figures that it compares.

    1. Write each seed into the cell of `SETTINGS`; leave out the checks, which no figure needs.
    2. Run all cells up to the last `over_seeds.compare`, in a fresh kernel.
    3. Write settings, seeds and tables into the package's records.

    With `real_models`, the cells see the folder of real models; the record is `LESSON_real.json`.

    Raises:
        LoadError: a lesson that compares nothing, or whose settings have not one seed.
        ConfigError: `real_models` without the variable that names their folder.
    """
    if real_models and not os.environ.get(REAL_MODELS):
        raise ConfigError(f"{REAL_MODELS} is unset; let it name the folder of the real models.")
    before = _seconds_of_children()
    found = [figures_of_seed(master, seed, real_models) for seed in range(1, seeds + 1)]
    seconds = (_seconds_of_children() - before) / seeds
    settings = {name: value for name, value in found[0][0].items() if name != "seed"}
    tables = {
        table: {name: [round(each[table][name], 5) for _, each in found] for name in figures}
        for table, figures in found[0][1].items()
    }
    record = {
        "made_by": f"python -m tools.course record {master.stem} --seeds {seeds}"
        + " --real-models" * real_models,
        "made_on": f"{platform.machine()}, {seconds:.0f} processor seconds per seed",
        "settings": settings,
        "seeds": list(range(1, seeds + 1)),
        "tables": tables,
    }
    path = root / RECORDS / f"{master.stem}{'_real' * real_models}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def _seconds_of_children() -> float:
    """Processor seconds of all kernels that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures_of_seed(
    master: Path, seed: int, real_models: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the tables of one seed."""
    notebook = with_seed(solution_notebook(master), seed, master.stem)
    with tempfile.TemporaryDirectory() as place:
        done = run_lesson(notebook, place, master.stem, real_models)
    text = "".join(output.get("text", "") for output in done.cells[-1].outputs)
    settings, tables = json.loads(text.split(PRINTED, 1)[1])
    return settings, tables


def with_seed(notebook: NotebookNode, seed: int, lesson: str) -> NotebookNode:
    """The code of a solution with another seed, and a last cell that prints its figures.

    Raises:
        LoadError: a lesson that compares nothing, or whose settings have not one seed.
    """
    code = [cell for cell in code_of(notebook) if not cell.source.startswith("check(")]
    comparing = [i for i, cell in enumerate(code) if COMPARES in cell.source]
    set_up = [cell for cell in code if SET_UP.search(cell.source)]
    if not comparing or len(set_up) != 1 or len(SEED.findall(set_up[0].source)) != 1:
        raise LoadError(
            f"lesson {lesson} has no figures over seeds; write `seed=1` into its SETTINGS, and "
            f"call {COMPARES}...) in its cells."
        )
    set_up[0].source = SEED.sub(f"seed={seed}", set_up[0].source)
    notebook.cells = [*code[: comparing[-1] + 1], new_code_cell(LAST_CELL)]
    return notebook
