"""The page of performance, generated from stored results alone."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Record
from benchmarks.sheet import Sheet
from benchmarks.sheets import sheets
from benchmarks.summary import rows
from benchmarks.work import Work

TEMPLATE = Path(__file__).with_name("performance.template.md")


def page(results: Sequence[Record], sources: Sequence[str]) -> str:
    """The whole page as Markdown, one part per stored result.

    Args:
        sources: for each result a link to the file that holds it.
    """
    parts = ["## At a glance\n", _overview(results).markdown()]
    for result, source in zip(results, sources, strict=True):
        parts += [f"## {label(result)}\n", _circumstances(result, source)]
        parts += [sheet.markdown() for sheet in sheets(result)]
    return TEMPLATE.read_text(encoding="utf-8").replace("<<figures>>", "\n".join(parts))


def label(result: Record) -> str:
    """A result in a few words: shape, device, precision."""
    work = result["work"]
    return f"{work['shape']}, {work['device']}, {work['precision']}"


def _overview(results: Sequence[Record]) -> Sheet:
    """Each contestant's seconds, a column for each kind of result, whose first one counts."""
    first: dict[str, Record] = {}
    for result in results:
        first.setdefault(label(result), result)
    results = list(first.values())
    found = [{r.name: r for r in rows(x["contestants"], Work(**x["work"]).tokens)} for x in results]
    names = dict.fromkeys(name for result in found for name in result)

    def cell(name: str, of: dict) -> str:
        if name not in of:
            return ""
        row = of[name]
        ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
        return f"{row.seconds:.3g}{ratio}"

    body = [[name, *(cell(name, of) for of in found)] for name in names]
    return Sheet(["seconds per phase (ratio)", *first], body)


def _circumstances(result: Record, source: str) -> str:
    machine, work = result["machine"], result["work"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB; device "
        f"{machine['device']}; {machine['system']}, Python {machine['python']}, torch "
        f"{machine['torch']}, TransformerLens {machine['transformer_lens']}. Batch "
        f"{work['batch_size']}, prefix {work['prefix_len']}, {work['gen_len']} new tokens, "
        f"{work['threads']} threads each, {result['repeats']} turns.",
        f"From {source}, made by `{result['command']}`.",
        *(_versions(name, one) for name, one in result["contestants"].items()),
        *result["left_out"].values(),
    ]
    return "\n\n".join(lines) + "\n"


def _versions(name: str, one: Record) -> str:
    return f"{name}: {', '.join(f'{package} {v}' for package, v in one['versions'].items())}."
