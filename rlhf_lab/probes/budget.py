"""The compute budget of probes: the time and the megabytes that they may add to a run."""

import json
from dataclasses import dataclass

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.probe import Record

MEGABYTE = 2**20


@dataclass(frozen=True)
class Budget:
    """What a suite may add to a run.

    Args:
        mb: megabytes stored over the whole run.
        time_frac: of the run's own time.

    Raises:
        ConfigError: a value that is not a number above 0.
    """

    mb: float | int = 64
    time_frac: float | int = 0.15

    def __post_init__(self) -> None:
        for name in ("mb", "time_frac"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, float | int) or not value > 0:
                raise ConfigError(f"{name}={value!r} must be a number greater than 0.")


def record_bytes(record: Record) -> int:
    """What a record takes to store, its checks aside."""
    return len(json.dumps(record.values)) + sum(x.nbytes for x in record.tensors.values())
