"""Folders for the runs of a lesson: a new one each time, so that a cell can be run again."""

import tempfile
from pathlib import Path


def new_run(name: str) -> Path:
    """A place for a run that nothing has been written to, below the system's temporary folder.

    Each call gives another one, whose last part is `name`. It is not made yet.
    """
    return Path(tempfile.mkdtemp(prefix="rlhf_lab-")) / name
