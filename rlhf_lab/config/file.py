"""Settings from a file: YAML 1.2, of which JSON is a part, such as the run.json of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_lab.errors import ConfigError


def read_settings(path: str | Path) -> dict[str, Any]:
    """What a file sets, by name; names and values are checked by `RLHFArgs`.

    A file with the entry `args` is the run.json of a run, and what stands there is taken.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or sets nothing.
    """
    from ruamel.yaml import YAML, YAMLError  # not for --help

    try:
        found = YAML(typ="safe", pure=True).load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"config={str(path)!r} cannot be read ({problem}); name a file."
        ) from None
    except (YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        where = f", line {place.line + 1}" if place else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ConfigError(f"{path}{where} is no YAML ({problem}); correct it.") from None
    if isinstance(found, Mapping) and isinstance(found.get("args"), Mapping):
        found = found["args"]
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"{path} sets no field; write one on each line, such as kl_coef: 0.1.")
    return {str(name): value for name, value in found.items()}
