"""Packages that only one logger needs, imported when it is asked for."""

import importlib
from types import ModuleType

from rlhf_lab.errors import ConfigError


def import_logger(module: str, logger: str) -> ModuleType:
    """The module that a logger writes with.

    Raises:
        ConfigError: its package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"loggers={logger!r} needs a package that is not installed ({error}); "
            'pip install "rlhf_lab[loggers]".'
        ) from error
