"""The methods beside the untrained policy and the exact frontier."""

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.results.groups import Group, circumstances, commands
from benchmarks.results.prose import FALLS_SHORT, METHODS, UNHELD
from benchmarks.sheet import Sheet

GOOD_TRUE_REWARD = 0.9
METHODS_HEAD = (
    *("method", "trained", "KL coefficient", "true reward", "KL", "frontier", "distance"),
    *("grammatical", "of those, true reward"),
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
    true_reward, share = (
        (lambda r: r["initial"]["true_reward"]),
        (lambda r: r["initial"]["grammatical"]),
    )
    cells = ["untrained", "", "", every.spread(true_reward), "0.00", "", ""]
    return [
        *cells,
        f"{every.mean(share):.3f}",
        f"{every.mean(true_reward) / every.mean(share):.3f}",
    ]


def method_row(group: Group) -> list[str]:
    """The cells of a method's row."""
    true_reward = group.mean(true_reward_of)
    share = group.mean(lambda r: r["final"]["grammatical_fraction"])
    best = group.mean(lambda r: r["best_true_reward"])
    method, trained, controller = group.labels
    coefficient = group.mean(lambda r: r["final"]["kl_coef"])
    return [
        method,
        trained,
        f"{controller}, {coefficient:.2g}",
        group.spread(true_reward_of),
        group.spread(lambda r: r["final"]["kl_per_sequence"], 2),
        f"{best:.3f}",
        f"{best - true_reward:.3f}",
        f"{share:.3f}",
        f"{true_reward / share:.3f}" if share else "",
    ]


def true_reward_of(record: Record) -> float:
    """The true reward after training, of 1,024 fresh samples."""
    return record["final"]["true_reward"]


def verdict(found: Sequence[Group]) -> str:
    """How many runs beat the untrained policy, and how many reach 0.9."""
    every = [record for group in found for record in group.records]
    better = sum(true_reward_of(r) > r["initial"]["true_reward"] for r in every)
    good = sum(true_reward_of(r) >= GOOD_TRUE_REWARD for r in every)
    worst = min(every, key=true_reward_of)
    return (
        f"Of {len(every)} runs, {better} end above the untrained policy, {good} at a true reward "
        f"of {GOOD_TRUE_REWARD} or more; the lowest is {', '.join(worst['labels'])}, seed "
        f"{worst['seed']}, at {true_reward_of(worst):.3f}.\n"
    )


def shortfall(group: Group) -> str:
    """Of a row whose true reward stays below 0.9: how much of that is grammar, how much content."""
    true_reward = group.mean(true_reward_of)
    if true_reward >= GOOD_TRUE_REWARD:
        return ""
    share = group.mean(lambda r: r["final"]["grammatical_fraction"])
    kl = group.mean(lambda r: r["final"]["kl_per_sequence"])
    told = f"{', '.join(group.labels)} stays at {true_reward:.3f}: {1 - share:.1%} of its "
    told += (
        f"texts are no reviews (true reward 0), and its reviews average {true_reward / share:.3f}"
        if share
        else "review"
    )
    return f"{told}, at {kl:.2f} nats.\n"
