"""Memory and reward of a real model: plain, with adapters, in bf16."""

from collections.abc import Sequence

from benchmarks.results.groups import Group, circumstances
from benchmarks.results.prose import REAL
from benchmarks.results.settings import command_line
from benchmarks.sheet import Sheet


def real_part(found: Sequence[Group]) -> str:
    """Memory and reward of a real model, next to the plain run."""
    head = ["", "peak in phase 0, MB", "in any phase, MB", "loaded, MB", "weights, MB"]
    head += ["that learn, MB", "optimizer's state, MB"]
    head += ["reward, first phase", "last phase", "best", "KL, last phase"]
    first = found[0].records[0]
    text = (
        f"{first['models'][0]} rewarded by {first['models'][1]}, {len(first['curve'])} phases, "
        f"{first['threads']} thread(s). {circumstances(found)}"
    )
    parts = [REAL, text, Sheet(head, map(real_row, found)).markdown(), "The commands:\n"]
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
    """Format the command of each, with the reader's own directories."""
    paths = {"base_model": "path/to/SmolLM2", "reward_model": "path/to/classifier"}
    lines = (command_line("smol", paths | g.records[0]["fields"]) for g in found)
    return "```console\n" + "\n".join(lines) + "\n```\n"
