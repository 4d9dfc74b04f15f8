"""The methods beside the untrained policy and the exact frontier."""

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.results.groups import Group, circumstances, commands
from benchmarks.results.prose import FALLS_SHORT, METHODS, UNHELD
from benchmarks.sheet import Sheet

GOOD_GOLD = 0.9
METHODS_HEAD = (
    *("method", "trained", "KL coefficient", "gold reward", "KL", "frontier", "distance"),
    *("grammatical", "of those, gold"),
)


def methods_part(found: Sequence[Group]) -> str:
    """All methods beside the untrained policy and the exact frontier."""
    body = [untrained(found), *map(method_row, found)]
    parts = [
        METHODS,
        circumstances(found),
        Sheet(METHODS_HEAD, body, texts=3).markdown(),
    ]
    parts += [
        verdict(found),
        *filter(None, map(shortfall, found)),
        FALLS_SHORT,
        "The settings of each row:\n",
        commands(found),
    ]
    return "\n".join(parts)


def unheld_part(found: Sequence[Group]) -> str:
    """What happens to a method when nothing holds a learning phase back."""
    return "\n".join(
        [UNHELD, Sheet(METHODS_HEAD, map(method_row, found), texts=3).markdown(), commands(found)]
    )


def untrained(found: Sequence[Group]) -> list[str]:
    """The policy before training, as every run sampled it in its first phase."""
    every = Group((), [record for group in found for record in group.records])
    gold, share = (lambda r: r["initial"]["gold"]), (lambda r: r["initial"]["grammatical"])
    cells = ["untrained", "", "", every.spread(gold), "0.00", "", ""]
    return [*cells, f"{every.mean(share):.3f}", f"{every.mean(gold) / every.mean(share):.3f}"]


def method_row(group: Group) -> list[str]:
    """The cells of a method's row."""
    gold = group.mean(gold_of)
    share = group.mean(lambda r: r["final"]["grammatical_fraction"])
    best = group.mean(lambda r: r["best_gold"])
    method, trained, controller = group.labels
    coefficient = group.mean(lambda r: r["final"]["kl_coef"])
    return [
        method,
        trained,
        f"{controller}, {coefficient:.2g}",
        group.spread(gold_of),
        group.spread(lambda r: r["final"]["kl_per_sequence"], 2),
        f"{best:.3f}",
        f"{best - gold:.3f}",
        f"{share:.3f}",
        f"{gold / share:.3f}" if share else "",
    ]


def gold_of(record: Record) -> float:
    """The gold reward after training, of 1,024 fresh samples."""
    return record["final"]["gold_reward"]


def verdict(found: Sequence[Group]) -> str:
    """How many runs beat the untrained policy, and how many reach 0.9."""
    every = [record for group in found for record in group.records]
    better = sum(gold_of(r) > r["initial"]["gold"] for r in every)
    good = sum(gold_of(r) >= GOOD_GOLD for r in every)
    worst = min(every, key=gold_of)
    return (
        f"Of {len(every)} runs, {better} end above the untrained policy, {good} at a gold "
        f"reward of {GOOD_GOLD} or more; the lowest is {', '.join(worst['labels'])}, seed "
        f"{worst['seed']}, at {gold_of(worst):.3f}.\n"
    )


def shortfall(group: Group) -> str:
    """Of a row whose gold reward stays below 0.9: how much of that is grammar, how much content."""
    gold = group.mean(gold_of)
    if gold >= GOOD_GOLD:
        return ""
    share = group.mean(lambda r: r["final"]["grammatical_fraction"])
    kl = group.mean(lambda r: r["final"]["kl_per_sequence"])
    told = f"{', '.join(group.labels)} stays at {gold:.3f}: {1 - share:.1%} of its texts are no "
    told += f"reviews (gold 0), and its reviews average {gold / share:.3f}" if share else "review"
    return f"{told}, at {kl:.2f} nats.\n"
