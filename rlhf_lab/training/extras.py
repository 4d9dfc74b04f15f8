"""Optional imports: packages that one setting needs, imported when it is used."""

import importlib
from types import ModuleType

from rlhf_lab.errors import ConfigError


def import_extra(module: str, asked_by: str, extra: str, instead: str = "") -> ModuleType:
    """A module of a package that comes with an extra.

    Raises:
        ConfigError: it is not installed; `asked_by` says what needs it, `instead` what else helps.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{asked_by} needs a package that is not installed ({error}); "
            f"pip install 'rlhf_lab[{extra}]'{instead}."
        ) from error
