"""Runs notebooks one after the other, each in a process of its own that starts with all imported.

Usage: python run_notebooks.py NOTEBOOK... Each has what it printed in a .txt beside it, with the
exit status in the last line.
"""

import os
import sys
import traceback
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

import rlhf_lab.course
import rlhf_lab.probes
import rlhf_lab.training  # noqa: F401


def run(notebook: Path) -> None:
    """Run all cells as a kernel would, without showing the last expression of each."""
    shell = InteractiveShell.instance()
    shell.ast_node_interactivity = "none"
    shell.safe_execfile_ipy(notebook, raise_exceptions=True)


def run_in_child(notebook: Path) -> int:
    """The exit status of a forked process that runs a notebook, 1 if a cell fails."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with notebook.with_suffix(".txt").open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    status = 0
    try:
        run(notebook)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        status = run_in_child(path)
        with path.with_suffix(".txt").open("a") as printed:
            printed.write(f"\nexit status {status}\n")
