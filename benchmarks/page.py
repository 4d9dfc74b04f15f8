"""The page of performance: medians, ratios and tables of stored records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.records import Record
from benchmarks.sheet import Sheet
from benchmarks.work import Work

TEMPLATE = Path(__file__).with_name("performance.template.md")
KEYS = frozenset({"machine", "work", "command", "contestants"})
PHASE_HEAD = ("", "seconds", "fastest to slowest", "ratio", "rollout", "learning", "tokens/s")


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
    tokens_per_second: float
    over_model_bytes: int
    stages: dict[str, float]


def rows(timings: Record, tokens: int) -> list[Row]:
    """Compute the medians of all contestants, with their ratio to the first one."""
    first = _median(next(iter(timings.values()))["phases"], "seconds")
    return [_row(name, one, tokens, first) for name, one in timings.items()]


def _row(name: str, one: Record, tokens: int, first: float) -> Row:
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
        tokens_per_second=tokens / seconds,
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
    work = Work(**record["work"])
    found = rows(record["contestants"], work.tokens)
    trained = work.size.n_trained
    note = (
        f"Gradients and Adam's moments of the {trained / 1e6:.1f} million weights (12 bytes each) "
        f"take {12 * trained / 1e6:.0f} MB of this memory."
    )
    stages = dict.fromkeys(stage for row in found for stage in row.stages)
    body = [
        [stage, *(f"{r.stages[stage]:.3f}" if stage in r.stages else "" for r in found)]
        for stage in stages
    ]
    head = ["seconds of each stage", *(row.name for row in found)]
    sheets = [_phases(found, note), Sheet(head, body)]
    if "probes" in record:
        fraction, each = probe_cost(record["probes"])
        body = [[name, f"{seconds:.3f}"] for name, seconds in each.items()]
        body.append(["added to the run, measured", f"{fraction:.1%}"])
        phases = len(record["probes"]["ours-run"]["phases"]) - 1
        sheets.append(Sheet([f"the default probes in a run of {phases} phases", "seconds"], body))
    return sheets


def _phases(found: Sequence[Row], note: str) -> Sheet:
    body = [
        [
            row.name,
            f"{row.seconds:.3f}",
            f"{row.fastest:.3f} to {row.slowest:.3f}",
            f"{row.ratio:.2f}",
            f"{row.rollout:.3f}",
            f"{row.learning:.3f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.over_model_bytes / 1e6:.0f}",
        ]
        for row in found
    ]
    return Sheet([*PHASE_HEAD, "peak memory over the models, MB"], body, note)


def page(records: Sequence[Record], source: str) -> str:
    """Write the page as Markdown, with one part per stored record."""
    parts = []
    for record in records:
        phases, _, *probes = tables(record)
        parts += [f"## {_label(record)}\n", _circumstances(record, source)]
        parts += [sheet.markdown() for sheet in (phases, *probes)]
    return TEMPLATE.read_text(encoding="utf-8").replace("<<figures>>", "\n".join(parts))


def _label(record: Record) -> str:
    work = record["work"]
    return f"{work['shape']}, {work['device']}, {work['precision']}"


def _circumstances(record: Record, source: str) -> str:
    machine, work = record["machine"], record["work"]
    versions: dict[str, list[str]] = {}
    for name, one in record["contestants"].items():
        text = ", ".join(f"{package} {version}" for package, version in one["versions"].items())
        versions.setdefault(text, []).append(name)
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB; "
        f"{machine['system']}, Python {machine['python']}. Batch {work['batch_size']}, prefix "
        f"{work['prefix_len']}, {work['gen_len']} new tokens, threads of each: {work['threads']}, "
        f"turns: {record['repeats']}. {record.get('when', '')}",
        f"`{record['command']}` ({source}). "
        + " ".join(f"{', '.join(names)}: {text}." for text, names in versions.items()),
        *record["left_out"].values(),
    ]
    return "\n\n".join(line.rstrip() for line in lines) + "\n"
