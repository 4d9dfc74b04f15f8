"""Copies of the lessons, for use without a clone of the repository."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rlhf_lab import __version__
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.extras import install_command

LESSON_KINDS = ("notebooks", "solutions")
"""The lessons unsolved, and each lesson executed with its exercises solved."""
VERSION_FILE = "version.txt"


def lessons(kind: str) -> list[Path]:
    """The notebooks that came with this version: beside the code in a wheel, or in the clone.

    Raises:
        LoadError: they are in neither place.
    """
    package = Path(__file__).parents[1]
    for place in (package / "course" / kind, package.parent / kind):
        found = sorted(place.glob("[0-9][0-9]_*.ipynb"))
        if found:
            return found
    raise LoadError(
        f"the {kind} of the lessons are not beside the package in {package}; install it again."
    )


def copy_lessons(directory: Path) -> list[Path]:
    """Copy the lessons, unsolved, into a new directory, and their solutions into one apart in it.

    Raises:
        ConfigError: something is there already: it may be work in progress.
        LoadError: the directory cannot be written, or there are no lessons to copy.
    """
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise ConfigError(f"{str(directory)!r} is there and no directory; name another place.")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(
            f"{str(directory)!r} is not empty, and lessons in it may be work in progress; name "
            "another place."
        )
    copied = []
    try:
        for kind in LESSON_KINDS:
            place = directory / "solutions" if kind == "solutions" else directory
            place.mkdir(parents=True, exist_ok=True)
            copied += [Path(shutil.copyfile(path, place / path.name)) for path in lessons(kind)]
        (directory / VERSION_FILE).write_text(f"rlhf_lab {__version__}\n", encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write {str(directory)!r} ({error.strerror}).") from None
    return copied


def open_lessons(directory: Path) -> int:
    """Start JupyterLab in a directory of lessons, which is copied first if it is not there.

    Returns JupyterLab's exit status.

    Raises:
        ConfigError: JupyterLab is not installed, or the directory holds something else.
        LoadError: see `copy_lessons`.
    """
    if find_spec("jupyterlab") is None:
        raise ConfigError(
            f"course open requires the package jupyterlab; {install_command('course')}, or open "
            "the notebooks in an editor."
        )
    if not sorted(directory.glob("[0-9][0-9]_*.ipynb")):
        copy_lessons(directory)
    return subprocess.run([sys.executable, "-m", "jupyterlab", str(directory)]).returncode
