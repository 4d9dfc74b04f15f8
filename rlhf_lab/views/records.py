"""Records of probes: their fields, what is computed from them, and pictures of both."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.views.color import Kind
from rlhf_lab.views.intervals import bracketed
from rlhf_lab.views.pictures import Bars, Curves, Kinds, Matrix, Picture, Strip, Table

MOST_ROWS, MOST_SLOTS = 24, 60  # of bars or a table; of positions
ENDS = ("", "_low", "_high")
Drawn = Kinds | Picture | str
# the name of a field, whose interval is in NAME_low and NAME_high; three names; or a function
Column = str | tuple[str, ...] | Callable[["Snapshot"], Any]
Columns = Mapping[str, Column]


class Snapshot:
    """One record of a probe with its tensors."""

    def __init__(self, run: Run, name: str, record: Mapping[str, Any]) -> None:
        self.run, self.name, self.record = run, name, record

    @property
    def phase(self) -> int:
        """The phase of the record."""
        return self.record["phase"]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors stored with the record."""
        return self.run.tensors(self.name, self.phase)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the probe, such as the words that it compares."""
        probes = self.run.store.read_suite()["probes"]
        return next((probe for probe in probes if probe["name"] == self.name), {})

    def __getitem__(self, name: str) -> Any:
        """Return a field of the record, or a tensor as lists."""
        if name in self.record or not self.run.store.tensor_path(self.name, self.phase).is_file():
            return self.record[name]
        return self.tensors[name].tolist()

    def get(self, name: str) -> Any:
        """Return a field or tensor, or None if the record has neither."""
        try:
            return self[name]
        except KeyError:
            return None

    def title(self, text: str) -> str:
        """Return a title with the fields or settings in braces; {number} counts steps from 1."""
        fields = {"number": self.record.get("step", 0) + 1, **self.settings, **self.record}
        return f"phase {self.phase}: {text.format_map(fields)}"


def short_site(site: str) -> str:
    """Return a hook name as a label: blocks.1.hook_resid_post -> 1 post."""
    return site.removeprefix("blocks.").replace(".hook_resid_", " ").replace(".hook_", " ")


def slots(at: Snapshot, n: int) -> list[str]:
    """Return the names of the slots, or n positions."""
    return at.get("slots") or [str(i) for i in range(n)]


def read_column(at: Snapshot, column: Column) -> tuple[Any, Any, Any]:
    """Return the values of a column and the ends of their intervals, None if unknown."""
    if callable(column):
        found = column(at)
    else:
        names = [column + end for end in ENDS] if isinstance(column, str) else column
        found = tuple(map(at.get, names))
    parts = found if isinstance(found, tuple) else (found, None, None)
    parts = [x.tolist() if isinstance(x, Tensor) else x for x in parts]
    return tuple(parts) if None not in parts else (parts[0], None, None)


def _known(at: Snapshot, columns: Columns) -> dict[str, tuple[Any, Any, Any]]:
    found = {label: read_column(at, column) for label, column in columns.items()}
    return {label: column for label, column in found.items() if column[0] is not None}


def field_bars(
    at: Snapshot,
    title: str,
    labels: Sequence[object],
    columns: Columns,
    unit: str = "",
    top: int = MOST_ROWS,
) -> Bars | None:
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
    drawn = {name: pick(x) for name, (x, *_) in known.items()}
    return Bars(list(map(str, pick(labels))), drawn, at.title(title), unit, ends, note)


def matrix(
    at: Snapshot,
    title: str,
    values: Column,
    rows: Sequence[str],
    cols: Sequence[str],
    unit: str = "",
    kind: Kind = "sequential",
    limits: tuple[float, float] | None = None,
) -> Matrix | None:
    """Return a grid of a record, or None without the field; None in it stays blank.

    If the values have intervals, a note names the largest of all cells.
    """
    (grid, low, high), note = read_column(at, values), ""
    if grid is None:
        return None
    cells = [(x, i, j) for i, row in enumerate(grid) for j, x in enumerate(row) if x is not None]
    cells = [cell for cell in cells if low and cell[1] < len(low)]
    if cells:
        largest, i, j = max(cells)
        note = f"Largest of the {len(cells)} compared: {bracketed(largest, low[i][j], high[i][j])} "
        note += f"at {rows[i]}, {cols[j]} (95 % interval of this cell alone)."
    ends = None if low is None else (low, high)
    return Matrix(grid, rows, cols, at.title(title), unit, kind, limits, note, ends)


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
    labels, rows = rows_of_dicts(ranked[:MOST_ROWS], list(dict.fromkeys(names)))
    note = f"The {MOST_ROWS} largest of {len(found)}." if len(found) > MOST_ROWS else ""
    return Table(labels, rows, at.title(title), note) if rows else None


def rows_of_dicts(
    dicts: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[str], list[list[object]]]:
    """Return labels and rows of the named entries; ends of intervals become brackets."""
    ends = {k: (f"{k}_low", f"{k}_high") for k in names if f"{k}_low" in names}
    names = [k for k in names if not any(k in pair for pair in ends.values())]
    read = lambda row, k: bracketed(*map(row.get, (k, *ends[k]))) if k in ends else row.get(k)
    quoted = lambda x: repr(x) if isinstance(x, str) and x != x.strip() else x
    rows = [[quoted(read(row, k)) for k in names] for row in dicts]
    return [name.replace("_", " ") for name in names], rows


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
    found, rewards, rows = read_column(at, values)[0], at.get("rewards"), []
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
    records: Sequence[Snapshot],
    title: str,
    columns: Columns,
    unit: str = "",
    note: str = "",
    bands: Mapping[str, Mapping[int, Any]] | None = None,
) -> Curves | None:
    """Return curves over phases of the columns that any record has, or None.

    Args:
        bands: intervals by field and phase, for fields without their own.
    """
    phases, curves, ends = [at.phase for at in records], {}, {}
    for label, column in columns.items():
        known = [read_column(at, column) for at in records]
        if all(x is None for x, *_ in known):
            continue
        curves[label] = phases, [x for x, *_ in known]
        given = (bands or {}).get(column, {}) if isinstance(column, str) else {}
        pairs = [given.get(p, (a, b)) for p, (_, a, b) in zip(phases, known, strict=True)]
        if any(None not in pair for pair in pairs):
            ends[label] = tuple(map(list, zip(*pairs, strict=True)))
    return Curves(curves, title, unit, ends, note=note) if curves else None


def table_over(records: Sequence[Snapshot], title: str, columns: Columns) -> Table:
    """Return columns over phases as a table with intervals in brackets."""
    read = lambda at: [bracketed(*read_column(at, column)) for column in columns.values()]
    return Table(["phase", *columns], [[at.phase, *read(at)] for at in records], title)


def cell(field: str, *index: int) -> Callable[[Snapshot], tuple[Any, ...]]:
    """Return a column: one entry of a field of lists, and its ends."""

    def read(at: Snapshot) -> tuple[Any, ...]:
        found = [at.get(field + end) for end in ENDS]
        for i in index:
            found = [None if x is None else x[i] for x in found]
        return tuple(found)

    return read
