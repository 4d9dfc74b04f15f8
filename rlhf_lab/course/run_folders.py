"""Folders for the runs of a lesson: a new one each time, so that a cell can be run again."""

import tempfile
from pathlib import Path


def new_run(name: str) -> Path:
    """Return a new path in a new temporary folder; the last part is `name`."""
    return Path(tempfile.mkdtemp(prefix="rlhf_lab-")) / name
