"""Execution of lesson notebooks in a new kernel, and cleaning of their outputs."""

import os
import re
import tempfile
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from rlhf_lab.errors import LoadError

REAL_MODELS = "RLHF_LAB_REAL_MODELS"
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 600  # time limit of a cell, six times as long with real models


def execute(notebook: NotebookNode, lesson: str) -> NotebookNode:
    """Run all cells in a new kernel and directory, and keep what is the same each time."""
    with tempfile.TemporaryDirectory() as directory:
        return clean(run_lesson(notebook, directory, lesson), directory)


def run_lesson(
    notebook: NotebookNode, directory: str, lesson: str, real_models: bool = False
) -> NotebookNode:
    """Run all cells in a new kernel: offline, one thread, a separate progress file.

    Raises:
        LoadError: If a cell fails or takes too long; names the lesson.
    """
    seconds = CELL_SECONDS * (6 if real_models else 1)
    env = {k: v for k, v in os.environ.items() if real_models or k != REAL_MODELS}
    env |= {"RLHF_LAB_PROGRESS": str(Path(directory) / "progress.json"), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    client = NotebookClient(
        notebook,
        timeout=seconds,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": directory}},
    )
    try:
        return client.execute(env=env)
    except CellExecutionError as error:
        raise LoadError(f"lesson {lesson} does not run: {error.ename}: {error.evalue}") from error
    except CellTimeoutError as error:
        raise LoadError(
            f"lesson {lesson} has a cell that takes more than {seconds} s; run it on an idle "
            "machine."
        ) from error


def clean(notebook: NotebookNode, directory: str) -> NotebookNode:
    """Remove counts, warnings, addresses and temporary paths, and join printed pieces."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            if output.get("name") == "stderr":
                continue
            if "execution_count" in output:
                output.execution_count = None
            data = output.get("data", {})
            texts = [(data, kind) for kind in data if kind.startswith("text/")]
            for holder, key in [*texts, *([(output, "text")] if "text" in output else [])]:
                holder[key] = ADDRESS.sub("0x...", holder[key]).replace(directory, ".")
            if outputs and output.output_type == outputs[-1].output_type == "stream":
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs
    notebook.metadata = METADATA
    return notebook
