"""The methods next to the untrained policy and the exact frontier."""

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.results.groups import Group, circumstances, commands
from benchmarks.results.prose import METHODS
from benchmarks.sheet import Sheet

GOOD = 0.9
HEAD = (
    *("method", "trained", "KL coefficient", "true reward", "KL", "frontier", "distance"),
    *("grammatical", "of those, true reward"),
)


def methods_part(found: Sequence[Group]) -> str:
    """Show all methods next to the untrained policy and the exact frontier."""
    table = Sheet(HEAD, [_untrained(found), *map(_method_row, found)], texts=3).markdown()
    settings = "The settings of each row:\n"
    return "\n".join(
        [METHODS, circumstances(found), table, _summary(found), settings, commands(found)]
    )


def _untrained(found: Sequence[Group]) -> list[str]:
    every = Group((), [{"final": r["initial"]} for group in found for r in group.records])
    reward, fraction = every.mean(_true_reward), every.mean(lambda r: r["final"]["grammatical"])
    cells = ["untrained", "", "", every.spread(_true_reward), "0.00", "", ""]
    return [*cells, f"{fraction:.3f}", f"{reward / fraction:.3f}"]


def _method_row(group: Group) -> list[str]:
    reward = group.mean(_true_reward)
    fraction = group.mean(lambda r: r["final"]["grammatical_fraction"])
    best = group.mean(lambda r: r["best_true_reward"])
    method, trained, controller = group.labels
    return [
        method,
        trained,
        f"{controller}, {group.mean(lambda r: r['final']['kl_coef']):.2g}",
        group.spread(_true_reward),
        group.spread(lambda r: r["final"]["kl_per_sequence"], 2),
        f"{best:.3f}",
        f"{best - reward:.3f}",
        f"{fraction:.3f}",
        f"{reward / fraction:.3f}" if fraction else "",
    ]


def _true_reward(record: Record) -> float:
    return record["final"]["true_reward"]


def _summary(found: Sequence[Group]) -> str:
    every = [record for group in found for record in group.records]
    better = sum(_true_reward(r) > r["initial"]["true_reward"] for r in every)
    good = sum(_true_reward(r) >= GOOD for r in every)
    worst = min(every, key=_true_reward)
    return (
        f"Of {len(every)} runs, {better} end above the untrained policy, {good} at a true "
        f"reward of {GOOD} or more; the lowest is {', '.join(worst['labels'])}, seed "
        f"{worst['seed']}, at {_true_reward(worst):.3f}.\n"
    )
