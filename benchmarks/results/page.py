"""The results page (docs/results.md), generated from stored records alone: methods, real models."""

from collections.abc import Sequence
from statistics import mean

from benchmarks.records import Record
from benchmarks.results.algorithm_table import algorithms_part
from benchmarks.results.groups import Group, circumstances, groups, true_reward
from benchmarks.results.loopholes import learned_part, loophole_part
from benchmarks.results.prose import (
    AGAIN,
    ALT,
    INTRODUCTION,
    METHODS,
    OPTIONS,
    PPO_NUMBERS,
    REAL,
    REAL_OPTIONS,
    VARIANT_NUMBERS,
)
from benchmarks.results.ranking import ranking
from benchmarks.results.settings import CONTROLLERS, WEIGHTS, command_line
from benchmarks.results.settings import METHODS as METHOD_FIELDS
from benchmarks.sheet import Sheet

PICTURE = "results-methods.svg"
VARIANTS = [(weights, controller) for controller in CONTROLLERS for weights in WEIGHTS]


def methods_part(found: Sequence[Group]) -> str:
    """Show the picture of all methods, and numbers of PPO and of the other variants."""
    parts = [METHODS, f"![{ALT}]({PICTURE})\n"]
    by_labels = {group.labels: group for group in found}
    if ppo := by_labels.get((next(iter(METHOD_FIELDS)), *VARIANTS[0])):
        before = ppo.mean(lambda r: r["initial"]["true_reward"])
        kl = ppo.spread(lambda r: r["final"]["kl_per_sequence"], 2)
        parts.append(PPO_NUMBERS.format(before, ppo.spread(true_reward), kl))
    if all((name, *variant) in by_labels for name in METHOD_FIELDS for variant in VARIANTS):
        rewards = [[by_labels[n, *v].mean(true_reward) for n in METHOD_FIELDS] for v in VARIANTS]
        parts.append(VARIANT_NUMBERS.format(*map(mean, rewards)))
    return "\n".join([*parts, OPTIONS])


def real_part(found: Sequence[Group]) -> str:
    """Show memory and reward of a real model, next to the plain run."""
    head = ["", "loaded, MB", "peak, MB", "trained weights, MB"]
    head += ["reward, first phase", "last phase", "KL, last phase"]
    body = map(_real_row, found)
    return "\n".join(
        [REAL, Sheet(head, body).markdown(), _real_command(found[0].records[0]), REAL_OPTIONS]
    )


def _real_row(group: Group) -> list[str]:
    record = group.records[0]
    memory, curve = record["memory"], record["curve"]
    loaded = memory["loaded_bytes"]
    peak = max(phase["peak_bytes"] for phase in curve) - loaded
    return [
        *group.labels,
        *(f"{size / 1e6:.0f}" for size in (loaded, peak, memory["learning_bytes"])),
        *(f"{phase['mean_reward']:.3f}" for phase in (curve[0], curve[-1])),
        f"{curve[-1]['kl_per_sequence']:.2f}",
    ]


def _real_command(record: Record) -> str:
    """Format the command of a run, with placeholders for directories."""
    paths = {"base_model": "path/to/SmolLM2", "reward_model": "path/to/classifier"}
    return f"```console\n{command_line('smol', paths | record['fields'])}\n```\n"


def page(records: Sequence[Record]) -> str:
    """Write the whole page as Markdown; a part without records is left out."""
    parts = {
        "methods": methods_part,
        "loophole": loophole_part,
        "learned": learned_part,
        "algorithms": algorithms_part,
        "real": real_part,
    }
    found = {part: groups(records, part) for part in parts}
    written = [parts[part](those) for part, those in found.items() if those]
    every = [group for those in found.values() for group in those]
    return "\n".join([INTRODUCTION, *written, AGAIN, circumstances(every)])


def picture(records: Sequence[Record]) -> str:
    """Draw the picture of the methods, as SVG."""
    return ranking(groups(records, "methods"))
