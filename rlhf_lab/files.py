"""Files: the one function that writes them, and refuses what is there and not its own."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_lab.errors import RunError

PAGE_MARK = "<!-- written by rlhf_lab -->\n"
"""What a page or a picture that this package wrote ends with."""


@contextlib.contextmanager
def beside(path: Path, is_ours: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Write a file beside the old one, then rename it: readers see the old or the new one.

    Yields the path to write to. The file gets the mode of any other new file here; safetensors
    would leave it to its owner alone.

    Args:
        is_ours: see `refuse_foreign`.

    Raises:
        RunError: see `refuse_foreign`.
    """
    refuse_foreign(path, is_ours)
    partial = path.with_name(f".{path.name}.partial")
    clear_draft(partial)  # a link would be followed, and a pipe waited for
    try:
        partial.touch()
        mode = stat.S_IMODE(partial.stat().st_mode)
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.chmod(mode)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def clear_draft(partial: Path) -> None:
    """Take away what was left of a draft, whatever it is.

    Raises:
        RunError: a directory is in its place.
    """
    if partial.is_dir() and not partial.is_symlink():
        raise RunError(
            f"{partial} is a directory, in the place of a file that is being written; take it away."
        )
    partial.unlink(missing_ok=True)


def refuse_foreign(path: Path, is_ours: Callable[[Path], bool] | None = None) -> None:
    """Say so if a file must not go here.

    Args:
        is_ours: whether the regular file that is there may be replaced; any may when None, as
            befits a directory of our own.

    Raises:
        RunError: a directory, a device, a pipe, a link or a foreign file is there.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:  # nothing is there; where nothing can be, writing says so
        return
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    kind = kinds.get(stat.S_IFMT(mode))
    if kind is None and is_ours is not None and not is_ours(path):
        kind = "a file that rlhf_lab did not write there"
    if kind is not None:
        raise RunError(f"{path} is {kind}, which is left as it is; name a new file.")


def write_marked(path: Path, text: str) -> None:
    """Write a page or a picture with a mark at its end, over nothing but one that has the mark.

    Raises:
        RunError: something else is there, or the file cannot be written.
    """
    try:
        with beside(path, is_marked) as partial:
            partial.write_text(text + PAGE_MARK, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another place."
        ) from error


def is_marked(path: Path) -> bool:
    """Whether a regular file ends with the mark of `write_marked`."""
    mark = PAGE_MARK.encode()
    try:
        with open(path, "rb") as file:
            file.seek(-len(mark), os.SEEK_END)
            return file.read() == mark
    except OSError:  # shorter than the mark, or not to be read
        return False


def open_to_readers(directory: Path) -> None:
    """Give every file below a directory the mode of a new one, so that all who may can read it."""
    sample = directory / ".mode"
    sample.touch()
    mode = stat.S_IMODE(sample.stat().st_mode)
    sample.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)
