"""The results page (docs/results.md), generated from stored records alone: methods, real models."""

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.results.algorithm_table import algorithms_part
from benchmarks.results.groups import Group, circumstances, groups, seeds_per_row
from benchmarks.results.loopholes import learned_part, loophole_part
from benchmarks.results.prose import AGAIN, INTRODUCTION, METHODS, OPTIONS, REAL, REAL_OPTIONS
from benchmarks.results.settings import command_line
from benchmarks.sheet import Sheet

HEAD = (
    *("method", "KL coefficient", "true reward", "KL", "distance", "grammatical"),
    *("LoRA", "adaptive KL", "both"),
)


def methods_part(found: Sequence[Group]) -> str:
    """Show all methods next to the untrained policy, and their distance from the frontier."""
    by_labels = {group.labels: group for group in found}
    plain = [group for group in found if group.labels[1:] == ("all", "constant")]
    body = [_untrained(found), *(_method_row(group, by_labels) for group in plain)]
    table = Sheet(HEAD, body, texts=2).markdown()
    return "\n".join([METHODS, seeds_per_row(found), table, OPTIONS, _options(plain)])


def _options(plain: Sequence[Group]) -> str:
    """Show the options of each row that needs more than `--method NAME`."""
    fields = {group.labels[0]: group.records[0]["fields"] for group in plain}
    needed = {name: of for name, of in fields.items() if of.keys() - {"method"}}
    body = [[name, f"`{command_line('', of).split('  ')[1]}`"] for name, of in needed.items()]
    return Sheet(["method", "options"], body, texts=2).markdown()


def _untrained(found: Sequence[Group]) -> list[str]:
    every = Group((), [{"final": r["initial"]} for group in found for r in group.records])
    fraction = every.mean(lambda r: r["final"]["grammatical"])
    cells = ["untrained", "", every.spread(_true_reward), "0.00", "", f"{fraction:.3f}"]
    return [*cells, "", "", ""]


def _method_row(group: Group, by_labels: dict[tuple[str, ...], Group]) -> list[str]:
    distance = group.mean(lambda r: r["best_true_reward"]) - group.mean(_true_reward)
    variants = [("LoRA", "constant"), ("all", "adaptive"), ("LoRA", "adaptive")]
    others = (by_labels.get((group.labels[0], *variant)) for variant in variants)
    return [
        group.labels[0],
        f"{group.mean(lambda r: r['final']['kl_coef']):.2g}",
        group.spread(_true_reward),
        group.spread(lambda r: r["final"]["kl_per_sequence"], 2),
        f"{distance:.3f}",
        f"{group.mean(lambda r: r['final']['grammatical_fraction']):.3f}",
        *("" if other is None else f"{other.mean(_true_reward):.3f}" for other in others),
    ]


def _true_reward(record: Record) -> float:
    return record["final"]["true_reward"]


def real_part(found: Sequence[Group]) -> str:
    """Show memory and reward of a real model, next to the plain run."""
    head = ["", "peak in phase 0, MB", "in any phase, MB", "loaded, MB", "weights, MB"]
    head += ["that learn, MB", "optimizer's state, MB"]
    head += ["reward, first phase", "last phase", "best", "KL, last phase"]
    first = found[0].records[0]
    text = (
        f"{first['models'][0]} rewarded by {first['models'][1]}, {len(first['curve'])} phases, "
        f"{first['threads']} thread(s), one run each.\n"
    )
    return "\n".join(
        [
            *(REAL, text, Sheet(head, map(_real_row, found)).markdown()),
            *(_real_command(first), REAL_OPTIONS),
        ]
    )


def _real_row(group: Group) -> list[str]:
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
