"""Copies of the lessons for use without a clone, and folders for their runs."""

import atexit
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rlhf_lab import __version__
from rlhf_lab.errors import ConfigError, LoadError, install_command

VERSION_FILE = "version.txt"


def lessons_folder(kind: str) -> Path:
    """Return the folder of "notebooks" or "solutions", of a wheel or of the clone.

    Raises:
        LoadError: If the folder is missing.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "course" / kind, package.parent / kind):
        if any(folder.glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise LoadError(f"The {kind} are missing next to the package in {package}. Install it again.")


def copy_lessons(directory: Path) -> list[Path]:
    """Copy the unsolved lessons into a new directory, and the solutions into one within it.

    Raises:
        ConfigError: If the directory is not empty: it may hold work in progress.
        LoadError: If the directory cannot be written, or the lessons are missing.
    """
    copied = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"{str(directory)!r} is not empty. Choose another path.")
        for kind, copies in (("notebooks", directory), ("solutions", directory / "solutions")):
            folder = lessons_folder(kind)
            for path in (*folder.glob("[0-9][0-9]_*.ipynb"), *folder.glob("more/*.ipynb")):
                copy = copies / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copied.append(Path(shutil.copyfile(path, copy)))
        (directory / VERSION_FILE).write_text(f"rlhf_lab {__version__}\n", encoding="utf-8")
    except OSError as error:
        reason = f"({error.strerror}). Choose another path"
        raise LoadError(f"cannot write {str(directory)!r} {reason}.") from None
    return copied


def open_lessons(directory: Path) -> int:
    """Start JupyterLab in a directory of lessons, which is created if it is missing.

    Returns JupyterLab's exit status.

    Raises:
        ConfigError: If JupyterLab is not installed, or the directory contains something else.
        LoadError: See `copy_lessons`.
    """
    if find_spec("jupyterlab") is None:
        raise ConfigError(
            f"course open requires the package jupyterlab; {install_command('course')}, or open "
            "the notebooks in an editor."
        )
    if not sorted(directory.glob("[0-9][0-9]_*.ipynb")):
        copy_lessons(directory)
    return subprocess.run([sys.executable, "-m", "jupyterlab", str(directory)]).returncode


def new_run(name: str) -> Path:
    """Return a new path in a temporary folder, which is removed when Python exits."""
    folder = tempfile.TemporaryDirectory(prefix="rlhf_lab-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name) / name
