"""Pictures of fields of records: bars, matrices, tables, colored tokens, and curves over phases."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_lab.views.color import Kind
from rlhf_lab.views.intervals import bracketed
from rlhf_lab.views.pictures import Html, Picture, Table
from rlhf_lab.views.plots import bars, curves, heatmap
from rlhf_lab.views.records import Column, Snapshot
from rlhf_lab.views.tokens import Strip

MOST_ROWS = 24  # of bars or a table
Drawn = Picture | Strip | Table | Html
Columns = Mapping[str, Column]


def _known(at: Snapshot, columns: Columns) -> dict[str, tuple[Any, Any, Any]]:
    found = {label: at.read(column) for label, column in columns.items()}
    return {label: column for label, column in found.items() if column[0] is not None}


def field_bars(
    at: Snapshot,
    title: str,
    labels: Sequence[object],
    columns: Columns,
    unit: str = "",
    top: int = MOST_ROWS,
) -> Picture | None:
    """Return bars of a record, of many those of the largest sizes; None without the fields."""
    known, note = _known(at, columns), ""
    if not known or not labels:
        return None
    sizes = [max(abs(x[i] or 0.0) for x, *_ in known.values()) for i in range(len(labels))]
    kept = sorted(sorted(range(len(labels)), key=lambda i: -sizes[i])[:top])
    pick = lambda values: [values[i] for i in kept]
    ends = {name: (pick(a), pick(b)) for name, (_, a, b) in known.items() if a is not None}
    if ends:
        note = "Whiskers: 95 % intervals."
    if rest := set(range(len(labels))) - set(kept):
        sums = [f"{k} {sum(x[i] or 0.0 for i in rest):+.3g}" for k, (x, *_) in known.items()]
        note += f" {len(rest)} others sum to {', '.join(sums)}."
    series = {name: pick(x) for name, (x, *_) in known.items()}
    return bars(list(map(str, pick(labels))), series, at.title(title), unit, ends, note)


def matrix(
    at: Snapshot,
    title: str,
    values: Column,
    rows: Sequence[str],
    cols: Sequence[str],
    unit: str = "",
    kind: Kind = "sequential",
    limits: tuple[float, float] | None = None,
) -> Picture | None:
    """Return a grid of a record, or None without the field; None in it stays blank.

    If the values have intervals, a note names the largest of all cells.
    """
    (grid, low, high), note = at.read(values), ""
    if grid is None:
        return None
    cells = [(x, i, j) for i, row in enumerate(grid[: len(low or ())]) for j, x in enumerate(row)]
    if cells := [cell for cell in cells if cell[0] is not None]:
        largest, i, j = max(cells)
        note = f"Largest of the {len(cells)} compared: {bracketed(largest, low[i][j], high[i][j])} "
        note += f"at {rows[i]}, {cols[j]} (95 % interval of this cell alone)."
    ends = (low or (), high or ())
    return heatmap(grid, rows, cols, at.title(title), kind, limits, unit, ends, note)


def field_table(at: Snapshot, title: str, columns: Columns) -> Table | None:
    """Return columns of a record as a table with intervals in brackets, or None."""
    known = _known(at, columns)
    cells = [
        x if low is None else [bracketed(*each) for each in zip(x, low, high, strict=True)]
        for x, low, high in known.values()
    ]
    rows = list(zip(*cells, strict=True))
    return Table(list(known), rows, at.title(title)) if rows else None


def row_table(at: Snapshot, title: str, field: str, order: str = "") -> Table | None:
    """Return a list of dicts of a record as a table, by size of `order`, without nested values."""
    found = at.get(field) or ()
    names = [k for row in found for k, x in row.items() if not isinstance(x, list | dict)]
    ranked = sorted(found, key=lambda row: -abs(row[order])) if order else found
    note = f"The {MOST_ROWS} largest of {len(found)}." if len(found) > MOST_ROWS else ""
    title = at.title(title)
    return table_of_dicts(ranked[:MOST_ROWS], names, title, note) if found else None


def table_of_dicts(
    dicts: Sequence[Mapping[str, Any]], names: Sequence[str], title: str = "", note: str = ""
) -> Table:
    """Return the named entries as a table; ends of intervals become brackets."""
    ends = {k: (f"{k}_low", f"{k}_high") for k in names if f"{k}_low" in names}
    names = [k for k in dict.fromkeys(names) if not any(k in pair for pair in ends.values())]
    read = lambda row, k: bracketed(*map(row.get, (k, *ends[k]))) if k in ends else row.get(k)
    quoted = lambda x: repr(x) if isinstance(x, str) and x != x.strip() else x
    rows = [[quoted(read(row, k)) for k in names] for row in dicts]
    return Table([name.replace("_", " ") for name in names], rows, title, note)


def strip(
    at: Snapshot,
    title: str,
    values: Column,
    unit: str = "",
    kind: Kind = "diverging",
    mask: str = "mask",
    top: int | None = None,
) -> Strip | None:
    """Return generated tokens with their values, or None without the field; prompts have none.

    Args:
        top: number of texts, those of the largest sums of sizes; all by default.
    """
    found, rewards, rows = at.read(values)[0], at.get("rewards"), []
    if found is None:
        return None
    for i, (numbers, counts) in enumerate(zip(found, at[mask], strict=True)):
        known = [x if real else None for x, real in zip(numbers, counts, strict=True)]
        tokens = at["tokens"][i]
        prompt = [None] * (len(tokens) - len(known))
        label = f"text {i}" + (f", reward {rewards[i]:.4g}" if rewards else "")
        rows.append((label, tokens, prompt + known))
    if top is not None:
        rows = sorted(rows, key=lambda row: -sum(abs(x or 0.0) for x in row[2]))[:top]
    return Strip(rows, at.title(title), unit, kind)


def curves_over(
    records: Sequence[Snapshot], title: str, columns: Columns, unit: str = "", note: str = ""
) -> Picture | None:
    """Return curves over phases of the columns that any record has, or None."""
    phases, series, bands = [at.phase for at in records], {}, {}
    for label, column in columns.items():
        values, low, high = zip(*(at.read(column) for at in records), strict=True)
        if any(x is not None for x in values):
            series[label] = phases, values
            if any(None not in pair for pair in zip(low, high, strict=True)):
                bands[label] = low, high
    return curves(series, title, "phase", unit, bands, note=note) if series else None
