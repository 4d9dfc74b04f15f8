"""A reward with a loophole, built in or learned, next to the exact optima."""

from collections.abc import Sequence
from statistics import mean
from types import MappingProxyType

from benchmarks.records import Record
from benchmarks.results.groups import Group, commands, mean_record
from benchmarks.results.prose import LEARNED, LOOPHOLE, PHASES_TEXT
from benchmarks.sheet import Sheet

TABLE_PHASES = (0, 8, 16, 39)
EXPLOITED = MappingProxyType({"proxy": 3, "true_reward": 3, "popcorn": 2})
EXPLOITED_HEAD = ("KL", "proxy", "true reward", "popcorn")


def loophole_part(found: Sequence[Group]) -> str:
    """Show the result of each KL coefficient on the planted loophole, and phases of the last."""
    last = found[-1]
    phases = [i for i in TABLE_PHASES if i < len(last.records[0]["curve"])]
    by_phase = Sheet(["phase", *EXPLOITED_HEAD], [[str(i), *phase_cells(last, i)] for i in phases])
    kl_coef = last.records[0]["fields"]["kl_coef"]
    text = PHASES_TEXT.format(kl_coef)
    return "\n".join([LOOPHOLE, exploited(found), text, by_phase.markdown(), commands(found[-1:])])


def learned_part(found: Sequence[Group]) -> str:
    """Describe the end of the runs at the last KL coefficient of the learned reward."""
    records = found[-1].records
    bonus = mean(record["reward_model"]["popcorn_bonus"] for record in records)
    last = mean_record([phase for record in records for phase in record["curve"][-5:]])
    exact = mean_record([record["exact"] for record in records])
    numbers = [of[name] for name in ("popcorn", "true_reward") for of in (last, exact)]
    return LEARNED.format(bonus, records[0]["fields"]["kl_coef"], *numbers)


def exploited(found: Sequence[Group]) -> str:
    """Show the end of the runs of each KL coefficient, next to its exact optimum."""
    rows = [[f"{g.records[0]['fields']['kl_coef']:g}", *end_cells(g)] for g in found]
    return Sheet(["kl_coef", *EXPLOITED_HEAD], rows).markdown()


def end_cells(group: Group) -> list[str]:
    """Format the last five phases next to the optimum of this KL coefficient."""
    last = mean_record([phase for record in group.records for phase in record["curve"][-5:]])
    exact = mean_record([record["exact"] for record in group.records])
    kl = f"{last['kl_per_sequence']:.2f} ({exact['kl_per_sequence']:.2f})"
    return [kl, *exploited_cells(last, exact)]


def phase_cells(group: Group, phase: int) -> list[str]:
    """Format one phase next to the optimum at the same KL."""
    here = [record["curve"][phase] for record in group.records]
    now, exact = mean_record(here), mean_record([entry["exact"] for entry in here])
    return [f"{now['kl_per_sequence']:.2f}", *exploited_cells(now, exact)]


def exploited_cells(measured: Record, exact: Record) -> list[str]:
    """Format each measured number, with the exact one in parentheses."""
    return [f"{measured[k]:.{digits}f} ({exact[k]:.{digits}f})" for k, digits in EXPLOITED.items()]
