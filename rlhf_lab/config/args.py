"""RLHFArgs: every setting of a run in one frozen dataclass; fields not given come from a preset."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_lab.config.checks import check_args
from rlhf_lab.config.file import read_settings
from rlhf_lab.config.groups import AllFields
from rlhf_lab.config.names_elsewhere import instead_of
from rlhf_lab.config.presets import PRESETS
from rlhf_lab.errors import ConfigError

EARLIER_NAMES = MappingProxyType({"penalise_no_eos": "penalize_no_eos"})
"""What fields were called in the run.json of earlier runs, and are called now."""
EARLIER_VALUES = MappingProxyType({"keep_checkpoints": None})
"""What earlier runs did in which a field was not yet, whatever their preset says of it now."""


def _with_defaults(
    cls: type, preset: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """What is given, over the preset's fields, over those defaults that make way.

    A short run or a small batch need not say that it warms up for less, and cuts its batch into
    fewer parts, than a preset does: what was not asked for gives way to what was.

    1. The warm-up ends before the last phase.
    2. The minibatches are the largest number, of the preset's or less, that divides the batch.
    """
    fields = dict(preset) | dict(given)
    phases, batch = (
        fields.get(name, getattr(cls, name)) for name in ("total_phases", "batch_size")
    )
    warmup, parts = (
        fields.get(name, getattr(cls, name)) for name in ("warmup_steps", "num_minibatches")
    )
    if "warmup_steps" not in given and type(phases) is int and phases >= 1:
        fields["warmup_steps"] = min(warmup, phases - 1)
    if "num_minibatches" not in given and type(batch) is int and batch >= 1:
        fields["num_minibatches"] = next(n for n in range(parts, 0, -1) if batch % n == 0)
    return fields


def _preset_first(cls: type) -> type:
    """Let the fields of the chosen preset stand in for defaults that the caller does not give."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, **given: Any) -> None:
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(given.keys() - set(names))
        if unknown:
            here = instead_of(unknown[0], names)
            remedy = f"here it is {here}" if here else "see `help(RLHFArgs)`"
            raise ConfigError(f"RLHFArgs has no field {unknown[0]!r}; {remedy}.")
        preset = given.get("preset", cls.preset)
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(f"preset={preset!r} is unknown; choose one of {', '.join(PRESETS)}.")
        init(self, **_with_defaults(cls, PRESETS[preset], given))

    cls.__init__ = __init__
    return cls


@_preset_first
@dataclass(frozen=True, kw_only=True)
class RLHFArgs(AllFields):
    """The settings of one run; fields not given take their preset's value, and all are checked."""

    def __post_init__(self) -> None:
        check_args(self)

    @property
    def rounding(self) -> str:
        """The coarsest format that a forward pass rounds to: fp32, tf32 or bf16."""
        return self.precision if self.weight_precision == "fp32" else "bf16"

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RLHFArgs":
        """The inverse of `to_dict`, also of an earlier version's; unknown fields are refused."""
        return cls(**(EARLIER_VALUES | _named_now(fields)))

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> "RLHFArgs":
        """The settings in a YAML or JSON file, such as the run.json of a run; see `read_settings`.

        Args:
            changes: fields that stand over those of the file.

        Raises:
            ConfigError: a file or a value that cannot be; it names the file.
        """
        fields = settings_of(path) | changes
        try:
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def settings_of(path: str | Path) -> dict[str, Any]:
    """What a file sets, by the names that fields have now."""
    return _named_now(read_settings(path))


def _named_now(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by the names that they have now."""
    return {EARLIER_NAMES.get(name, name): value for name, value in fields.items()}
