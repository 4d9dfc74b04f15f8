"""A reward with a loophole, built in or learned, next to the exact optima."""

from collections.abc import Sequence
from statistics import mean
from types import MappingProxyType

from benchmarks.records import Record
from benchmarks.results.groups import Group, commands, mean_record, seeds_per_row
from benchmarks.results.prose import LEARNED, LOOPHOLE
from benchmarks.sheet import Sheet

TABLE_PHASES = (0, 4, 8, 16, 24, 39)
PAIRED = MappingProxyType({"proxy": 3, "true_reward": 3, "popcorn": 2})
EXPLOITED_HEAD = (
    "KL",
    *(f"{name.replace('_', ' ')}{of}" for name in PAIRED for of in ("", ", exact")),
)


def loophole_part(found: Sequence[Group]) -> str:
    """Show the result of each KL coefficient on the planted loophole, and phases of the last."""
    last = found[-1]
    phases = [i for i in TABLE_PHASES if i < len(last.records[0]["curve"])]
    by_phase = Sheet(["phase", *EXPLOITED_HEAD], [[str(i), *phase_cells(last, i)] for i in phases])
    kl_coef = last.records[0]["fields"]["kl_coef"]
    text = f"Phases at `kl_coef={kl_coef:g}`, next to the exact optimum at the same KL:\n"
    parts = [LOOPHOLE, *exploited(found), text, by_phase.markdown()]
    return "\n".join([*parts, commands(found[-1:])])


def learned_part(found: Sequence[Group]) -> str:
    """Show the same for a learned reward model, after the facts about this model."""
    facts = [record["reward_model"] for record in found[0].records]
    accuracy, bonus = (mean(f[name] for f in facts) for name in ("accuracy", "popcorn_bonus"))
    text = (
        f"The {len(facts)} reward models rank {accuracy:.1%} of the held-out pairs correctly. "
        f"Popcorn adds {bonus:.2f} standard deviations to a review's reward.\n"
    )
    return "\n".join([LEARNED, text, *exploited(found), learned_commands(found)])


def exploited(found: Sequence[Group]) -> list[str]:
    """Show the end of the runs of each KL coefficient, next to its exact optimum."""
    rows = [[f"{g.records[0]['fields']['kl_coef']:g}", *end_cells(g)] for g in found]
    text = "Averages over the last five phases, next to the exact optimum:\n"
    return [seeds_per_row(found), text, Sheet(["kl_coef", *EXPLOITED_HEAD], rows).markdown()]


def learned_commands(found: Sequence[Group]) -> str:
    """Format the command of the last row, after those that make its reward model."""
    make = "python -m rlhf_lab train-reward --pairs pairs.jsonl --out rewards/biased"
    first = [
        "python -m benchmarks.results.learned pairs.jsonl",
        f"{make} --steps {found[0].records[0]['preferences']['steps']} --seed 1",
    ]
    lines = commands(found[-1:]).replace("--seed 1", "--reward-model rewards/biased --seed 1")
    return lines.replace("```console\n", "\n".join(["```console", *first, ""]))


def end_cells(group: Group) -> list[str]:
    """Format the last five phases next to the optimum of this KL coefficient."""
    last = mean_record([phase for record in group.records for phase in record["curve"][-5:]])
    exact = mean_record([record["exact"] for record in group.records])
    kl = f"{last['kl_per_sequence']:.2f} (exact {exact['kl_per_sequence']:.2f})"
    return [kl, *paired_cells(last, exact)]


def phase_cells(group: Group, phase: int) -> list[str]:
    """Format one phase next to the optimum at the same KL."""
    here = [record["curve"][phase] for record in group.records]
    now, exact = mean_record(here), mean_record([entry["exact"] for entry in here])
    return [f"{now['kl_per_sequence']:.2f}", *paired_cells(now, exact)]


def paired_cells(measured: Record, exact: Record) -> list[str]:
    """Format each measured number next to the exact one."""
    return [f"{of[name]:.{digits}f}" for name, digits in PAIRED.items() for of in (measured, exact)]
