"""Costs of probes as a table, and its place on the page of causal probes."""

from collections.abc import Sequence
from statistics import median

from benchmarks.records import Record
from benchmarks.sheet import Sheet

BEGIN, END = "<!-- costs of probes: begin -->", "<!-- costs of probes: end -->"
ON_ADAPTERS = frozenset({"AdapterReading"})
"""Probes that are timed with LoRA, in a run of its own."""


def probe_costs(results: Sequence[Record]) -> Sheet:
    """Seconds of a record of each probe, and what it adds to a run at its default `every`.

    The share is a record's seconds over those of `every` phases; the phases are those of the run
    without a probe where there is one, and otherwise of the probe's own run, without its seconds.
    """
    shapes: dict[str, dict[str, tuple[str, str, str]]] = {}
    for result in results:
        found = {name: cost_of(result, name) for name in result["probes"]}
        shapes.setdefault(result["work"]["shape"], {}).update(found)
    head = ["probe", "every"]
    for shape in shapes:
        head += [f"{shape}: a record, s", f"{shape}: added to a run"]
    body = []
    for name in dict.fromkeys(name for costs in shapes.values() for name in costs):
        costs = [of.get(name) for of in shapes.values()]
        every = next(cost[0] for cost in costs if cost)
        cells = [x for cost in costs for x in (cost[1:] if cost else ("", ""))]
        body.append([f"`{name}`", every, *cells])
    return Sheet(head, body)


def cost_of(result: Record, name: str) -> tuple[str, str, str]:
    """How often a probe is called, the median seconds of its records, and their share of a run."""
    one = result["probes"][name]
    call, phase = median(one["calls"]), median(phases_of(result, name))
    if one["every"] is None:
        return "at the end", f"{call:.2f}", f"{call / phase:.1f} phases"
    return str(one["every"]), f"{call:.2f}", f"{call / phase / one['every']:.1%}"


def phases_of(result: Record, name: str) -> list[float]:
    """Seconds of the phases that a probe is compared with: adapters are trained faster."""
    one = result["probes"][name]
    return one["rest"] if name in ON_ADAPTERS or not result["plain"] else result["plain"]


def costs_page(page: str, results: Sequence[Record]) -> str:
    """The page with the table of these results, and their commands, between its two marks."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    sources = []
    for result in results:
        names = list(result["probes"])
        spent = sorted({round(median(phases_of(result, name)), 2) for name in names})
        calls = len(result["probes"][names[0]]["calls"])
        said = f"{calls} record{'s' * (calls != 1)} each, on {result['machine']['processor']}; "
        said += "a phase takes " + " or ".join(f"{x:.2f}" for x in spent) + " s"
        if result["plain"]:
            whole = [x for name, x in result["probes"].items() if name not in ON_ADAPTERS]
            share = [median(x["rest"]) / median(result["plain"]) for x in whole]
            said += f", and beside a probe {min(share):.2f} to {max(share):.2f} of a phase without"
        sources.append(f"- `{result['command']}`: {said}.")
        sources += [f"  - {why}" for why in result["left_out"].values()]
    table = probe_costs(results).markdown()
    return "\n".join([f"{before}{BEGIN}", "", table, *sources, "", f"{END}{after}"])
