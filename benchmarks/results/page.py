"""The results page (docs/results.md), generated from stored records alone."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import mean
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.records import Record
from benchmarks.results.prose import (
    FALLS_SHORT,
    INTRODUCTION,
    LEARNED,
    LOOPHOLE,
    METHODS,
    REAL,
    UNHELD,
)
from benchmarks.results.settings import all_rows, command_line

GOOD_GOLD = 0.9
SHOWN_PHASES = (0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 39)


class Group(NamedTuple):
    """The records of one row: the same question from several seeds."""

    labels: tuple[str, ...]
    records: list[Record]

    def mean(self, figure: Callable[[Record], float]) -> float:
        """A figure's mean over the seeds."""
        return mean(map(figure, self.records))

    def spread(self, figure: Callable[[Record], float], digits: int = 3) -> str:
        """A figure's mean over the seeds, and from what to what it goes."""
        values = list(map(figure, self.records))
        low, high = min(values), max(values)
        return f"{mean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def groups(records: Iterable[Record], part: str) -> list[Group]:
    """The records of a part, row by row, in the order of the settings."""
    order = {(row.part, row.labels): i for i, row in enumerate(all_rows())}

    def key(record: Record) -> tuple[str, tuple[str, ...]]:
        return record["part"], tuple(record["labels"])

    known = [record for record in records if key(record) in order]
    known.sort(key=lambda record: (order[key(record)], record["seed"]))
    return [Group(labels, list(same)) for (of, labels), same in groupby(known, key) if of == part]


def page(records: Sequence[Record]) -> str:
    """The whole page as Markdown; a part without records is left out."""
    parts = {
        "methods": methods_part,
        "unheld": unheld_part,
        "loophole": loophole_part,
        "learned": learned_part,
        "real": real_part,
    }
    found = ((write, groups(records, part)) for part, write in parts.items())
    return "\n".join([INTRODUCTION, *(write(those) for write, those in found if those)])


def table(head: Sequence[str], body: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table whose first columns are text and whose others are numbers."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *body]) + "\n"


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
        table(METHODS_HEAD, body, 3),
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
    return "\n".join([UNHELD, table(METHODS_HEAD, map(method_row, found), 3), commands(found)])


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


def circumstances(found: Sequence[Group]) -> str:
    """Seeds, weights and versions."""
    every = [record for group in found for record in group.records]
    seeds = sorted({len(group.records) for group in found})
    weights = sorted({record["weights"] for record in every if record["weights"]})
    machines = sorted({versions(record["machine"]) for record in every})
    told = [f"Seeds per row: {' or '.join(map(str, seeds))}."]
    if weights:
        told.append(f"Bundled weights {', '.join(weights)} (digest).")
    return " ".join([*told, *machines]) + "\n"


def versions(machine: dict[str, str]) -> str:
    """What the figures were made with."""
    return (
        f"{machine['processor']}, {machine['system']}, Python {machine['python']}, "
        f"torch {machine['torch']}, TransformerLens {machine['transformer_lens']}."
    )


def commands(found: Sequence[Group]) -> str:
    """What to type for each row."""
    lines = [command_line(g.records[0]["preset"], g.records[0]["fields"]) for g in found]
    return "```console\n" + "\n".join(f"{line} --seed 1" for line in lines) + "\n```\n"


def learned_commands(found: Sequence[Group]) -> str:
    """The same, after what makes the reward model that they name."""
    make = "python -m rlhf_lab train-reward --pairs pairs.jsonl --out rewards/biased"
    first = [
        "python -m benchmarks.results.learned pairs.jsonl",
        f"{make} --steps {found[0].records[0]['preferences']['steps']} --seed 1",
    ]
    lines = commands(found).replace("--seed 1", "--reward-model rewards/biased --seed 1")
    return lines.replace("```console\n", "\n".join(["```console", *first, ""]))


def loophole_part(found: Sequence[Group]) -> str:
    """The planted loophole: where each price of KL ends, and the way there."""
    return "\n".join([LOOPHOLE, *exploited(found), commands(found)])


def learned_part(found: Sequence[Group]) -> str:
    """The same of a reward model, after what is known of the reward model."""
    facts = [record["reward_model"] for record in found[0].records]
    accuracy, bonus = (mean(f[name] for f in facts) for name in ("accuracy", "popcorn_bonus"))
    told = (
        f"The {len(facts)} reward models order {accuracy:.1%} of held-out pairs rightly; popcorn "
        f"alone adds {bonus:.2f} to a review's reward, whose standard deviation over the texts "
        "they were trained on is 1.\n"
    )
    return "\n".join([LEARNED, told, *exploited(found), learned_commands(found)])


def exploited(found: Sequence[Group]) -> list[str]:
    """Both tables of a loophole."""
    cheapest = found[-1]
    ends = table(
        ["kl_coef", *EXPLOITED_HEAD],
        [[f"{g.records[0]['fields']['kl_coef']:g}", *end_cells(g)] for g in found],
    )
    phases = [i for i in SHOWN_PHASES if i < len(cheapest.records[0]["curve"])]
    way = table(["phase", *EXPLOITED_HEAD], [[str(i), *phase_cells(cheapest, i)] for i in phases])
    price = cheapest.records[0]["fields"]["kl_coef"]
    return [
        circumstances(found),
        "Where it ends (means over seeds of the last five phases), beside the exact optimum of "
        "`E[reward] - kl_coef KL`:\n",
        ends,
        f"The way there at `kl_coef={price:g}`, beside the exact optimum that has the same KL:\n",
        way,
        leaps(found),
    ]


PAIRED = MappingProxyType({"proxy": 3, "gold": 3, "popcorn": 2})
EXPLOITED_HEAD = (
    "KL",
    *(f"{name}{of}" for name in PAIRED for of in ("", ", exact")),
    "grammatical",
    "of those, gold",
)


def leaps(found: Sequence[Group]) -> str:
    """In how many phases the policy was off the language."""
    curves = [record["curve"] for group in found for record in group.records]
    phases = [phase for curve in curves for phase in curve]
    off = sum(phase["grammatical"] < 0.5 for phase in phases)
    home = sum(curve[-1]["grammatical"] >= 0.5 for curve in curves)
    return (
        f"In {off} of {len(phases)} phases of all runs fewer than half of the texts were reviews, "
        f"after a step too far; {home} of {len(curves)} runs ended with reviews.\n"
    )


def end_cells(group: Group) -> list[str]:
    """The last five phases beside the optimum at the price, KL included."""
    last = mean_of([phase for record in group.records for phase in record["curve"][-5:]])
    exact = mean_of([record["exact"] for record in group.records])
    kl = f"{last['kl_per_sequence']:.2f} (exact {exact['kl_per_sequence']:.2f})"
    return [kl, *paired_cells(last, exact)]


def phase_cells(group: Group, phase: int) -> list[str]:
    """One phase beside the optimum at the same KL."""
    here = [record["curve"][phase] for record in group.records]
    now, exact = mean_of(here), mean_of([entry["exact"] for entry in here])
    return [f"{now['kl_per_sequence']:.2f}", *paired_cells(now, exact)]


def paired_cells(measured: Record, exact: Record) -> list[str]:
    """Measured and exact side by side, then what the grammar says."""
    pairs = (
        f"{of[name]:.{digits}f}" for name, digits in PAIRED.items() for of in (measured, exact)
    )
    share = measured["grammatical"]
    return [*pairs, f"{share:.3f}", f"{measured['gold'] / share:.3f}" if share else ""]


def mean_of(entries: Sequence[Record]) -> Record:
    """The means of all numbers that the entries have under the same names."""
    names = [name for name, value in entries[0].items() if isinstance(value, int | float)]
    return {name: mean(entry[name] for entry in entries) for name in names}


def real_part(found: Sequence[Group]) -> str:
    """Memory and reward of a real model, beside the plain run."""
    head = ["", "peak in phase 0, MB", "in any phase, MB", "loaded, MB", "weights, MB"]
    head += ["that learn, MB", "optimiser's state, MB"]
    head += ["reward, first phase", "last phase", "best", "KL, last phase"]
    first = found[0].records[0]
    told = (
        f"{first['models'][0]} paid by {first['models'][1]}, {len(first['curve'])} phases, "
        f"{first['threads']} thread(s). {circumstances(found)}"
    )
    parts = [REAL, told, table(head, map(real_row, found)), "The commands:\n"]
    return "\n".join([*parts, real_commands(found)])


def real_row(group: Group) -> list[str]:
    """The cells of one run of a real model."""
    record = group.records[0]
    memory, curve = record["memory"], record["curve"]
    peaks = [phase["peak_bytes"] - memory["loaded_bytes"] for phase in curve]
    sizes = (
        peaks[0],
        max(peaks),
        *(memory[n] for n in ("loaded_bytes", "weight_bytes", "learning_bytes", "optimizer_bytes")),
    )
    rewards = [phase["mean_reward"] for phase in curve]
    return [
        *group.labels,
        *(f"{size / 1e6:.0f}" for size in sizes),
        *(f"{reward:.3f}" for reward in (rewards[0], rewards[-1], max(rewards))),
        f"{curve[-1]['kl_per_sequence']:.2f}",
    ]


def real_commands(found: Sequence[Group]) -> str:
    """What to type for each, with the reader's own directories."""
    own = {"base_model": "path/to/SmolLM2", "reward_model": "path/to/classifier"}
    lines = (command_line("smol", own | g.records[0]["fields"]) for g in found)
    return "```console\n" + "\n".join(lines) + "\n```\n"
