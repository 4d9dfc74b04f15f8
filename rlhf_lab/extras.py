"""Optional packages: importing them when a setting needs one, and the command to install them."""

import importlib
from types import ModuleType

from rlhf_lab import __version__
from rlhf_lab.errors import ConfigError


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
