"""The kernel that a lesson's notebook is executed in, and what is kept of its outputs."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from rlhf_lab.errors import LoadError

REAL_MODELS = "RLHF_LAB_REAL_MODELS"
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_SECONDS = 600


def execute(notebook: NotebookNode, lesson: str) -> NotebookNode:
    """Run all cells in a fresh kernel and directory, offline, and keep what is the same each time.

    Raises LoadError if a cell fails.
    """
    with tempfile.TemporaryDirectory() as place:
        return _steady(run_lesson(notebook, place, lesson), place)


def run_lesson(
    notebook: NotebookNode, place: str, lesson: str, real_models: bool = False
) -> NotebookNode:
    """`run_cells`, whose errors are told with the lesson's name.

    Raises LoadError if a cell fails, or takes longer than it may.
    """
    try:
        return run_cells(notebook, place, real_models)
    except CellExecutionError as error:
        raise LoadError(f"lesson {lesson} does not run: {error.ename}: {error.evalue}") from error
    except CellTimeoutError as error:
        raise LoadError(
            f"lesson {lesson} has a cell that takes more than {_patience(real_models)} s; run it "
            "where nothing else runs."
        ) from error


def _patience(real_models: bool) -> int:
    """The seconds that a cell may take."""
    return CELL_SECONDS * (6 if real_models else 1)


def run_cells(
    notebook: NotebookNode, place: str, real_models: bool = False, **listeners: Callable
) -> NotebookNode:
    """Run all cells in a fresh kernel in this directory.

    Args:
        real_models: whether the cells see the variable that names the folder of real models.
        listeners: nbclient's `on_cell_execute` and the like.

    Raises nbclient's CellExecutionError if a cell fails.
    """
    client = NotebookClient(
        notebook,
        timeout=_patience(real_models),
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": place}},
        **listeners,
    )
    return client.execute(env=_environment(place, real_models))


def _environment(place: str, real_models: bool) -> dict[str, str]:
    """Offline, with a progress file of its own and one thread; real models only if asked for."""
    own = {
        "RLHF_LAB_PROGRESS": str(Path(place) / "progress.json"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    hidden = () if real_models else (REAL_MODELS,)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | own


def _steady(notebook: NotebookNode, place: str) -> NotebookNode:
    """Leave out what differs from run to run: counts, warnings, addresses, temporary paths."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.outputs = _joined([o for o in cell.outputs if o.get("name") != "stderr"])
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
            if "text" in output:
                output.text = _steady_text(output.text, place)
            for kind, content in output.get("data", {}).items():
                if isinstance(content, str) and kind.startswith("text/"):
                    output.data[kind] = _steady_text(content, place)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Printed pieces that follow each other as one; what is shown between them stays there."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _steady_text(text: str, place: str) -> str:
    return ADDRESS.sub("0x...", text).replace(place, ".")
