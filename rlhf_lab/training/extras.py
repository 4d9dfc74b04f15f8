"""Packages that only one setting needs, imported when it is asked for."""

import importlib
from types import ModuleType

from rlhf_lab.errors import ConfigError


def import_extra(module: str, asked_by: str, extra: str, instead: str = "") -> ModuleType:
    """A module of a package that comes with an extra.

    Args:
        asked_by: the setting or call that needs it, for the complaint.
        instead: what else can be done, for the end of the complaint.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{asked_by} needs a package that is not installed ({error}); "
            f"pip install 'rlhf_lab[{extra}]'{instead}."
        ) from error
