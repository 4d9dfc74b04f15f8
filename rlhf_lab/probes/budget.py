"""The compute budget of probes: the time and the megabytes that they may add to a run."""

import dataclasses
import json
from dataclasses import dataclass

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.probe import Record

MEGABYTE = 2**20
LINE_BYTES, TENSOR_BYTES, FILE_BYTES = 160, 128, 512
"""What phase and probe add to a line, and the header of a file of tensors, at most."""


@dataclass(frozen=True)
class Budget:
    """What a suite may add to a run.

    Args:
        mb: megabytes that its files take on disk at most, over the whole run: records, checks,
            tensors, notes and eval text.
        time_frac: of the run's own time, as far as it can be foretold from the phases so far.

    Raises:
        ConfigError: a value that is not a number above 0.
    """

    mb: float | int = 64
    time_frac: float | int = 0.10

    def __post_init__(self) -> None:
        for name in ("mb", "time_frac"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, float | int) or not value > 0:
                raise ConfigError(f"{name}={value!r} must be a number greater than 0.")


NOTE_BYTES = 2048
"""What is kept free for the notes on each probe, of which the last says that it is refused."""


def bytes_at_most(record: Record) -> int:
    """No less than what a record takes on disk: its line, those of its checks, and its tensors."""
    lines = [record.values, *map(dataclasses.asdict, record.checks)]
    size = sum(len(json.dumps(line)) + LINE_BYTES for line in lines)
    for name, x in record.tensors.items():
        size += x.nbytes + TENSOR_BYTES + len(name) + 24 * x.ndim
    return size + (FILE_BYTES if record.tensors else 0)
