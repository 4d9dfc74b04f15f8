"""The records of one row of the page of results, and texts about them in each part."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import mean
from typing import NamedTuple

from benchmarks.records import Record
from benchmarks.results.settings import all_rows, command_line


class Group(NamedTuple):
    """The records of one row, one per seed."""

    labels: tuple[str, ...]
    records: list[Record]

    def mean(self, figure: Callable[[Record], float]) -> float:
        """Compute the mean of a number over the seeds."""
        return mean(map(figure, self.records))

    def spread(self, figure: Callable[[Record], float], digits: int = 3) -> str:
        """Format the mean over the seeds, and the range."""
        values = list(map(figure, self.records))
        low, high = min(values), max(values)
        return f"{mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def groups(records: Iterable[Record], part: str) -> list[Group]:
    """Group the records of a part by row, in the order of the settings."""
    order = {(row.part, row.labels): i for i, row in enumerate(all_rows())}

    def key(record: Record) -> tuple[str, tuple[str, ...]]:
        return record["part"], tuple(record["labels"])

    known = [record for record in records if key(record) in order]
    known.sort(key=lambda record: (order[key(record)], record["seed"]))
    return [Group(labels, list(same)) for (of, labels), same in groupby(known, key) if of == part]


def true_reward(record: Record) -> float:
    """Return the true reward after training."""
    return record["final"]["true_reward"]


def circumstances(found: Sequence[Group]) -> str:
    """Describe weights and versions."""
    every = [record for group in found for record in group.records]
    weights = sorted({record["weights"] for record in every if record["weights"]})
    machines = sorted({versions(record["machine"]) for record in every})
    digests = [f"Bundled weights {', '.join(weights)} (digest)."] if weights else []
    return " ".join([*digests, *machines]) + "\n"


def versions(machine: dict[str, str]) -> str:
    """Describe the machine of the records."""
    return (
        f"{machine['processor']}, {machine['system']}, Python {machine['python']}, "
        f"torch {machine['torch']}, TransformerLens {machine['transformer_lens']}."
    )


def commands(found: Sequence[Group]) -> str:
    """Format the command of each row."""
    lines = [command_line(g.records[0]["preset"], g.records[0]["fields"]) for g in found]
    return "```console\n" + "\n".join(f"{line} --seed 1" for line in lines) + "\n```\n"


def mean_record(entries: Sequence[Record]) -> Record:
    """Average all numbers with the same names."""
    names = [name for name, value in entries[0].items() if isinstance(value, int | float)]
    return {name: mean(entry[name] for entry in entries) for name in names}
