"""The table of algorithms at one KL: what each changed in the model, and what replicates."""

from collections.abc import Callable, Sequence

from benchmarks.records import Record
from benchmarks.results.groups import Group, circumstances
from benchmarks.results.prose import ALGORITHMS_TEXT, GRAFTS_TEXT
from benchmarks.sheet import Sheet

CAUSES = ("own_weights", "inherited", "scale", "read_out")


def algorithms_part(found: Sequence[Group]) -> str:
    """The true reward, causes of the shift, ranks, weights and grafts of each algorithm."""
    groups = list(found[0].records[0]["relative"])
    shift_head = ("own weights", "inherited", "norm's scale", "read-out")
    first = ("algorithm", "seeds", "true reward", "KL", *shift_head, "stable rank", "for 90 %")
    rows = [
        [
            group.labels[0],
            str(len(group.records)),
            group.spread(lambda r: r["true_reward"]),
            group.spread(lambda r: r["kl"], 2),
            *(group.spread(_entry("shift", cause), 2) for cause in CAUSES),
            group.spread(lambda r: r["stable_rank"], 1),
            group.spread(lambda r: r["k90"], 0),
        ]
        for group in found
    ]
    weights = [[g.labels[0], *(g.spread(_entry("relative", n)) for n in groups)] for g in found]
    grafts = [
        [f"{g.labels[0]}, {how}", *(g.spread(_graft(name, i), 2) for name in groups)]
        for g in found
        for i, how in enumerate(("put in", "taken out"))
    ]
    return "\n".join(
        [
            ALGORITHMS_TEXT,
            circumstances(found),
            Sheet(first, rows).markdown(),
            "The norm of each group's change over that of the group:\n",
            Sheet(("algorithm", *groups), weights).markdown(),
            GRAFTS_TEXT,
            Sheet(("algorithm", *groups), grafts).markdown(),
            "What holds in every seed there is:\n",
            *(f"- {line}" for line in replicates(found, groups)),
            "",
            "```console\npython -m benchmarks.results --only ppo grpo dpo sft\n```\n",
        ]
    )


def replicates(found: Sequence[Group], groups: Sequence[str]) -> list[str]:
    """Return a line per algorithm: what is first, and in how many seeds."""
    lines = []
    for group in found:
        cause = _first(group, lambda r: {c: abs(r["shift"][c]) for c in CAUSES})
        moved = _first(group, lambda r: r["relative"])
        put = _first(group, lambda r: {n: r["grafts"][n][0] for n in groups})
        out = _first(group, lambda r: {n: r["grafts"][n][1] for n in groups})
        cause = cause.replace("_", " ")
        lines.append(
            f"{group.labels[0]}: largest cause of the shift {cause}; largest relative change "
            f"{moved}; adds most reward alone {put}; loses most if removed {out}."
        )
    return lines


def _first(group: Group, figures: Callable[[Record], dict[str, float]]) -> str:
    tops = [max(of, key=of.get) for of in map(figures, group.records)]
    names = sorted(set(tops), key=lambda name: (-tops.count(name), name))
    return ", ".join(f"{name} ({tops.count(name)} of {len(tops)})" for name in names)


def _entry(table: str, name: str) -> Callable[[Record], float]:
    return lambda record: record[table][name]


def _graft(name: str, which: int) -> Callable[[Record], float]:
    return lambda record: record["grafts"][name][which]
