"""The table of algorithms at one KL: causes of the shift, and results that replicate."""

from collections.abc import Callable, Sequence

from benchmarks.records import Record
from benchmarks.results.groups import Group, seeds_per_row
from benchmarks.results.prose import ALGORITHMS_TEXT, REPLICATES_TEXT
from benchmarks.sheet import Sheet

CAUSES = ("own_weights", "inherited", "scale", "read_out")


def algorithms_part(found: Sequence[Group]) -> str:
    """Show true reward, causes of the shift and ranks of each algorithm, and what replicates."""
    groups = list(found[0].records[0]["relative"])
    shift_head = ("own weights", "inherited", "norm's scale", "unembedding")
    first = ("algorithm", "true reward", "KL", *shift_head, "stable rank", "for 90 %")
    rows = [
        [
            group.labels[0],
            group.spread(lambda r: r["true_reward"]),
            group.spread(lambda r: r["kl"], 2),
            *(group.spread(_entry("shift", cause), 2) for cause in CAUSES),
            group.spread(lambda r: r["stable_rank"], 1),
            group.spread(lambda r: r["k90"], 0),
        ]
        for group in found
    ]
    return "\n".join(
        [
            ALGORITHMS_TEXT,
            seeds_per_row(found),
            Sheet(first, rows).markdown(),
            REPLICATES_TEXT,
            replicates(found, groups).markdown(),
        ]
    )


def replicates(found: Sequence[Group], groups: Sequence[str]) -> Sheet:
    """Show the component with the largest effect on the reward, and in how many seeds."""
    head = ("algorithm", "adds most reward", "loses most reward if removed")
    rows = [
        [
            group.labels[0],
            *(_first(group, lambda r, i=i: {n: r["grafts"][n][i] for n in groups}) for i in (0, 1)),
        ]
        for group in found
    ]
    return Sheet(head, rows, texts=3)


def _first(group: Group, figures: Callable[[Record], dict[str, float]]) -> str:
    tops = [max(of, key=of.get) for of in map(figures, group.records)]
    names = sorted(set(tops), key=lambda name: (-tops.count(name), name))
    return ", ".join(f"{name} ({tops.count(name)} of {len(tops)})" for name in names)


def _entry(table: str, name: str) -> Callable[[Record], float]:
    return lambda record: record[table][name]
