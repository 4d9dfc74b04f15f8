"""Results as tables for the terminal."""

from statistics import median

from rich.table import Column, Table

from benchmarks.summary import Row, Stored, floor_distance, growth_exponent, probe_cost, rows
from benchmarks.work import Work


def tables(result: Stored) -> list[Table]:
    """All that the result holds."""
    work = Work(**result["work"])
    found = [_phases(rows(result["contestants"], work.tokens)), _stages(result, work)]
    found.append(_floor(result))
    if "generation" in result:
        generation = rows(result["generation"], work.tokens, "ours-sampling")
        found.append(_phases(generation, "Sampling alone"))
    if "growth" in result:
        found.append(_growth(result["growth"]))
    if "commands" in result:
        found.append(_commands(result["commands"]))
    if "probes" in result:
        found.append(_probes(result["probes"]))
    return found


def _phases(found: list[Row], title: str = "One phase (medians)") -> Table:
    table = Table(Column("", no_wrap=True), "seconds", "ratio", "rollout", "learning", title=title)
    table.add_column("tokens/s")
    table.add_column("peak memory over the models")
    for row in found:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        times = (f"{s:.3f}" for s in (row.rollout, row.learning))
        rate, memory = f"{row.tokens_per_second:.0f}", f"{row.over_model_bytes / 1e6:.0f} MB"
        table.add_row(row.name, f"{row.seconds:.3f}", ratio, *times, rate, memory)
    return table


def _stages(result: Stored, work: Work) -> Table:
    found = rows(result["contestants"], work.tokens)
    table = Table("stage", *(row.name for row in found), title="Seconds of each stage")
    for stage in dict.fromkeys(stage for row in found for stage in row.stages):
        cells = (f"{row.stages[stage]:.3f}" if stage in row.stages else "" for row in found)
        table.add_row(stage, *cells)
    return table


def _floor(result: Stored) -> Table:
    table = Table("part", "GFLOP", "seconds", title="The arithmetic alone")
    floor = result["floor"]
    for part, flops in floor["flops"].items():
        table.add_row(part, f"{flops / 1e9:.2f}", f"{floor['seconds'][part]:.3f}")
    total = sum(floor["seconds"].values())
    table.add_row("all", f"{sum(floor['flops'].values()) / 1e9:.2f}", f"{total:.3f}")
    if "ours" in result["contestants"]:
        table.add_row("ours takes", "", f"{floor_distance(result):.2f} times this")
    return table


def _growth(growth: Stored) -> Table:
    table = Table("axis", "from", "to", "exponent", title="Growth of a phase's time")
    for axis, measured in growth.items():
        ends = str(measured[0][axis]), str(measured[-1][axis])
        table.add_row(axis, *ends, f"{growth_exponent(measured, axis):.2f}")
    return table


def _commands(seconds: dict[str, list[float]]) -> Table:
    table = Table("command", "seconds", title="Commands, as processes of their own (medians)")
    for name, each in seconds.items():
        table.add_row(name, f"{median(each):.2f}")
    return table


def _probes(figures: Stored) -> Table:
    share, each = probe_cost(figures)
    table = Table("probe", "seconds over the run", title=f"The default probes add {share:.1%}")
    for name, seconds in each.items():
        table.add_row(name, f"{seconds:.3f}")
    return table
