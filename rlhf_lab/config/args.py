"""RLHFArgs: every setting of a run in one frozen dataclass; fields not given come from a preset."""

import dataclasses
import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlhf_lab.config.checks import check_args
from rlhf_lab.config.groups import AllFields
from rlhf_lab.config.presets import PRESETS
from rlhf_lab.errors import ConfigError

EARLIER_NAMES = MappingProxyType({"penalise_no_eos": "penalize_no_eos"})
"""What fields were called in the run.json of earlier runs, and are called now."""
EARLIER_VALUES = MappingProxyType({"keep_checkpoints": None})
"""What earlier runs did in which a field was not yet, whatever their preset says of it now."""


def _preset_first(cls: type) -> type:
    """Let the fields of the chosen preset stand in for defaults that the caller does not give."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, **given: Any) -> None:
        unknown = sorted(given.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(f"RLHFArgs has no field {unknown[0]!r}; see `help(RLHFArgs)`.")
        preset = given.get("preset", cls.preset)
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(f"preset={preset!r} is unknown; choose one of {', '.join(PRESETS)}.")
        init(self, **(PRESETS[preset] | given))

    cls.__init__ = __init__
    return cls


@_preset_first
@dataclass(frozen=True, kw_only=True)
class RLHFArgs(AllFields):
    """The settings of one run; fields not given take their preset's value, and all are checked."""

    def __post_init__(self) -> None:
        check_args(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RLHFArgs":
        """The inverse of `to_dict`, also of an earlier version's; unknown fields are refused."""
        named = {EARLIER_NAMES.get(name, name): value for name, value in fields.items()}
        return cls(**(EARLIER_VALUES | named))
