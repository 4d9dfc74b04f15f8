"""Exceptions for errors of the user: what is wrong and what to do; optional packages."""

import importlib
from types import ModuleType
from typing import Any

from rlhf_lab import __version__


class LabError(Exception):
    """An error that the user can fix; the command line prints it and returns 2."""


class ConfigError(LabError):
    """A wrong value, or a wrong combination of values, in the arguments."""


class LoadError(LabError):
    """A model, tokenizer, reward or data file that is missing or broken."""


class RunError(LabError):
    """A run directory or checkpoint that is missing, occupied, corrupt or not writable."""


class RankError(RunError):
    """An error of one of several processes, which reports it itself, not only on rank 0."""


class LostRankError(RankError):
    """Another process of the run has ended; the run can be resumed from its last save."""


def format_argument(value: Any) -> str:
    """Format a wrong argument for a message: the value of a text or number, otherwise the type."""
    is_plain = isinstance(value, str | int | float | None)
    return repr(value)[:60] if is_plain else getattr(value, "__name__", type(value).__name__)


def require_list(texts: Any, field: str = "") -> None:
    """Raise ConfigError for a text, dict or set instead of a list of texts, which it iterates."""
    if isinstance(texts, str | dict | set):
        raise ConfigError(f"{field}{texts!r:.60} is a {type(texts).__name__}. Pass a list.")


def install_command(extra: str) -> str:
    """Return the instruction to install an extra from a clone or a wheel; not from PyPI."""
    wheel = f"path/to/rlhf_lab-{__version__}-py3-none-any.whl"
    return f"""run `pip install -e ".[{extra}]"` in a clone, or `pip install "{wheel}[{extra}]"`"""


def import_extra(module: str, required_by: str, extra: str, instead: str = "") -> ModuleType:
    """Import a module that an extra installs, or raise ConfigError that names it and `instead`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{required_by} requires a package that is not installed ({error}); "
            f"{install_command(extra)}{instead}."
        ) from error
