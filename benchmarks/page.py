"""The page of performance: medians, ratios and tables of stored records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.records import Record
from benchmarks.sheet import Sheet

TEMPLATE = Path(__file__).with_name("performance.template.md")
KEYS = frozenset({"machine", "work", "command", "contestants"})
PHASE_HEAD = ("", "seconds", "fastest to slowest", "ratio", "rollout", "learning", "memory, MB")


@dataclass(frozen=True)
class Row:
    """Medians of one contestant, and the range of its seconds.

    Args:
        ratio: its seconds over this package's.
        over_model_bytes: peak memory minus that of the loaded models.
    """

    name: str
    seconds: float
    fastest: float
    slowest: float
    rollout: float
    learning: float
    ratio: float
    over_model_bytes: int
    stages: dict[str, float]


def rows(timings: Record) -> list[Row]:
    """Compute the medians of all contestants, with their ratio to the first one."""
    first = _median(next(iter(timings.values()))["phases"], "seconds")
    return [_row(name, one, first) for name, one in timings.items()]


def _row(name: str, one: Record, first: float) -> Row:
    phases = one["phases"]
    stages = dict.fromkeys(stage for phase in phases for stage in phase["stages"])
    seconds = _median(phases, "seconds")
    return Row(
        name=name,
        seconds=seconds,
        fastest=min(phase["seconds"] for phase in phases),
        slowest=max(phase["seconds"] for phase in phases),
        rollout=_median(phases, "rollout"),
        learning=_median(phases, "learning"),
        ratio=seconds / first,
        over_model_bytes=max(phase["peak_bytes"] for phase in phases) - one["loaded_bytes"],
        stages={s: median(phase["stages"].get(s, 0.0) for phase in phases) for s in stages},
    )


def _median(phases: Sequence[Record], name: str) -> float:
    return median(phase[name] for phase in phases)


def probe_cost(timings: Record) -> tuple[float, dict[str, float]]:
    """Compute the fraction of CPU seconds that probes add, and the seconds of each probe."""
    unit = "cpu_seconds" if "cpu_seconds" in timings["ours-run"]["phases"][0] else "seconds"
    plain, probed = (sum(phase[unit] for phase in one["phases"]) for one in timings.values())
    each: dict[str, float] = {}
    for phase in timings["ours-run-with-probes"]["phases"]:
        for stage, seconds in phase["stages"].items():
            name = stage.removeprefix("probes/")
            each[name] = each.get(name, 0.0) + seconds
    return probed / plain - 1, each


def tables(record: Record) -> list[Sheet]:
    """Make all tables of a record."""
    found = rows(record["contestants"])
    stages = dict.fromkeys(stage for row in found for stage in row.stages)
    body = [
        [stage, *(f"{r.stages[stage]:.3f}" if stage in r.stages else "" for r in found)]
        for stage in stages
    ]
    head = ["seconds of each stage", *(row.name for row in found)]
    sheets = [_phases(found), Sheet(head, body)]
    if "probes" in record:
        fraction, each = probe_cost(record["probes"])
        body = [[name, f"{seconds:.3f}"] for name, seconds in each.items()]
        body.append(["added to the run, measured", f"{fraction:.1%}"])
        phases = len(record["probes"]["ours-run"]["phases"]) - 1
        sheets.append(Sheet([f"the default probes in a run of {phases} phases", "seconds"], body))
    return sheets


def _phases(found: Sequence[Row]) -> Sheet:
    body = [
        [
            row.name,
            f"{row.seconds:.3f}",
            f"{row.fastest:.3f} to {row.slowest:.3f}",
            f"{row.ratio:.2f}",
            f"{row.rollout:.3f}",
            f"{row.learning:.3f}",
            f"{row.over_model_bytes / 1e6:.0f}",
        ]
        for row in found
    ]
    return Sheet(PHASE_HEAD, body)


def page(records: Sequence[Record], source: str) -> str:
    """Write the page as Markdown, with one table of all stored records."""
    body, sources, probes = [], [], []
    for record in records:
        machine, work = record["machine"], record["work"]
        label = f"{work['shape']}, {work['device']}, {work['precision']}"
        phases, _, *others = tables(record)
        body += [[label, row[0], row[1], row[3], row[-1]] for row in phases.body]
        sources.append(
            f"- {label}: `{record['command']}` ({machine['processor']}, {machine['cores']} cores). "
            f"{record.get('when', '')}".rstrip()
        )
        probes += [sheet.markdown() for sheet in others]
    head = ["model", "", "seconds", "ratio", "memory, MB"]
    table = Sheet(head, body, f"Records: {source}", texts=2).markdown()
    figures = "\n".join([table, *sources, "", *probes])
    return TEMPLATE.read_text(encoding="utf-8").replace("<<figures>>", figures)
