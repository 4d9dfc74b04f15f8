"""Atomic writes of files, which replace only files that this package wrote."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_lab.errors import RunError

AnyPath = str | os.PathLike  # a Run or a RunDir stands for its directory
PAGE_MARK = "<!-- written by rlhf_lab -->\n"  # the last line of pages and pictures


def expand_home(path: AnyPath) -> Path:
    """Return a path with `~` expanded; unlike Path.expanduser, keep `~` of an unknown user."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a RunError that names the file if a write fails."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}. Make room or choose another path "
            "(what was saved before is intact)."
        ) from error


@contextlib.contextmanager
def partial_file(
    path: Path, is_ours: Callable[[Path], bool] | None = None, flush: bool = True
) -> Iterator[Path]:
    """Yield a partial file that replaces `path` afterwards, so readers see the old or the new one.

    With `flush`, also after a power cut. The file gets the mode of any other new file; safetensors
    would allow only its owner to read it.
    """
    validate_replaceable(path, is_ours)
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        clear_draft(partial)
        try:
            partial.touch()
            mode = stat.S_IMODE(partial.stat().st_mode)
            yield partial
            if flush:
                with open(partial, "rb+") as file:
                    os.fsync(file.fileno())
            partial.chmod(mode)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def clear_draft(partial: Path) -> None:
    """Remove a partial file, or a link or pipe at its path, which must not be written to."""
    if partial.is_dir() and not partial.is_symlink():
        raise RunError(f"{partial} is a directory. Remove it.")
    partial.unlink(missing_ok=True)


def validate_replaceable(path: Path, is_ours: Callable[[Path], bool] | None = None) -> None:
    """Raise RunError unless `path` is free or a regular file that `is_ours`, if passed, accepts."""
    with contextlib.suppress(OSError):  # there is nothing
        if not stat.S_ISREG(path.lstat().st_mode):
            raise RunError(f"{path} is a link, directory, pipe or device. Use a new file.")
        if is_ours is not None and not is_ours(path):
            raise RunError(f"{path} is a file that rlhf_lab did not write there. Use a new file.")


def write_marked(path: Path, text: str) -> None:
    """Write a page or a picture that ends with `PAGE_MARK`, replacing only one of those."""
    with partial_file(path, is_marked) as partial:
        partial.write_text(text + PAGE_MARK, encoding="utf-8")


def is_marked(path: Path) -> bool:
    """Return True if a regular file ends with `PAGE_MARK`."""
    with contextlib.suppress(OSError):
        return path.read_bytes().endswith(PAGE_MARK.encode())
    return False


def open_to_readers(directory: Path) -> None:
    """Set the mode of every file in a new directory to the mode of a new file."""
    mode = directory.stat().st_mode & 0o666
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)
