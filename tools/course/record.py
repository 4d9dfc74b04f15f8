"""Stored records: a lesson run once per seed, and the parts and settings that records share."""

import functools
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from rlhf_lab.errors import ConfigError, LoadError
from tools.course.builder import SET_UP, code_cells, solution_notebook
from tools.course.runner import REAL_MODELS, run_lesson
from tools.course.size import lesson_name

RECORDS = Path("rlhf_lab", "course", "records")
SEEDS = (1, 2, 3)
RUN_SETTINGS: MappingProxyType[str, Any] = MappingProxyType(
    {"preset": "reel", "warmup_steps": 2, "batch_size": 128, "num_minibatches": 4}
    | {"gen_len": 26, "top_k": None, "advantages": "gae"}
)
Parts = Mapping[str, Callable[[], Any]]
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


def over_seeds(run: Callable[..., Any], *kinds: Any) -> Any:
    """Return a run's results of each seed, of each kind by name if there are kinds."""
    if kinds:
        return {kind: over_seeds(functools.partial(run, kind)) for kind in kinds}
    return [run(seed) for seed in SEEDS]


def columns(run: Callable[..., Any], *kinds: Any) -> dict[str, dict[str, list[float]]]:
    """Return a column over seeds for each metric of each kind of run."""
    found = over_seeds(run, *kinds)
    return {kind: {x: [one[x] for one in every] for x in every[0]} for kind, every in found.items()}


def write_parts(
    path: Path, heading: Mapping[str, Any], parts: Parts, chosen: Sequence[str], digits: int
) -> None:
    """Compute the chosen parts of a record, or all, and keep the others."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record |= heading
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in chosen or parts:
        record[part] = rounded(parts[part](), digits)
        path.write_text(in_rows(record), encoding="utf-8")  # a later part may take minutes


def rounded(values: Any, digits: int) -> Any:
    """Round all numbers of nested lists and mappings."""
    if isinstance(values, Mapping):
        return {name: rounded(value, digits) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value, digits) for value in values]
    return round(values, digits) if isinstance(values, float) else values


def in_rows(record: Mapping[str, Any]) -> str:
    """Format a record as JSON with each list of plain values on one line."""
    plain = r"\[\s+([^\[\]{}]*?)\s+\]"
    text = json.dumps(record, indent=1)
    return re.sub(plain, lambda row: f"[{' '.join(row[1].split())}]", text) + "\n"
