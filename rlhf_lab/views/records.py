"""Pictures of fields of probes' records: bars, curves, grids, tables and strips."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.views.color import Kind
from rlhf_lab.views.intervals import bracketed
from rlhf_lab.views.pictures import Bars, Curves, Kinds, Matrix, Picture, Strip, Table

MOST_ROWS = 24  # bars or rows of a table; a model of 30 layers has hundreds of components
MOST_SLOTS = 60  # positions of a lens, and bars of positions
ENDS = ("", "_low", "_high")
Drawn = Kinds | Picture | str
# A field, "FIELD LOW HIGH", numbers, or numbers with the ends of their intervals; the ends of a
# field NAME are NAME_low and NAME_high.
Column = Any
Series = str | Mapping[str, Column]  # columns by label, or names of fields


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


def short_site(site: str) -> str:
    """Return a hook name as a label: blocks.1.hook_resid_post -> 1 post."""
    return site.removeprefix("blocks.").replace(".hook_resid_", " ").replace(".hook_", " ")


def slots(at: Snapshot, n: int = MOST_SLOTS) -> list[str]:
    """Return the names of the slots, or n positions."""
    return at.get("slots") or [str(i) for i in range(n)]


def read_column(at: Snapshot, column: Column) -> tuple[Any, Any, Any]:
    """Return the values of a column and the ends of their intervals, None if unknown."""
    if isinstance(column, str):
        names = column.split()
        column = tuple(map(at.get, names if len(names) == 3 else [column + end for end in ENDS]))
    parts = column if isinstance(column, tuple) else (column, None, None)
    parts = [x.tolist() if isinstance(x, Tensor) else x for x in parts]
    return tuple(parts) if None not in parts else (parts[0], None, None)


def columns_by_label(series: Series) -> Mapping[str, Column]:
    """Return columns by label; the label of a field is its name with spaces."""
    if isinstance(series, str):
        return {name.replace("_", " "): name for name in series.split()}
    return series


def known_columns(at: Snapshot, series: Series) -> dict[str, tuple[Any, Any, Any]]:
    """Return the columns that the record has."""
    found = {k: read_column(at, column) for k, column in columns_by_label(series).items()}
    return {label: column for label, column in found.items() if column[0] is not None}


def record_bars(
    at: Snapshot,
    title: str,
    labels: str | Sequence[str],
    series: Series,
    unit: str = "",
    note: str = "",
    top: int = MOST_ROWS,
) -> Bars | None:
    """Return bars of a record, of many those of the largest sizes; None without the fields."""
    columns = known_columns(at, series)
    labels = at.get(labels) if isinstance(labels, str) else labels
    if not columns or not labels:
        return None
    sizes = [max(abs(x[i] or 0.0) for x, *_ in columns.values()) for i in range(len(labels))]
    kept = sorted(sorted(range(len(labels)), key=lambda i: -sizes[i])[:top])
    if rest := set(range(len(labels))) - set(kept):
        sums = [f"{k} {sum(x[i] or 0.0 for i in rest):+.3g}" for k, (x, *_) in columns.items()]
        note += f" {len(rest)} others sum to {', '.join(sums)}."
    pick = lambda values: [values[i] for i in kept]
    ends = {name: (pick(a), pick(b)) for name, (_, a, b) in columns.items() if a is not None}
    drawn = {name: pick(x) for name, (x, *_) in columns.items()}
    return Bars(pick(list(map(str, labels))), drawn, f"phase {at.phase}: {title}", unit, ends, note)


def curves_over(
    records: Sequence[Snapshot],
    title: str,
    series: Series,
    unit: str = "",
    note: str = "",
    bands: Mapping[str, Mapping[int, Any]] | None = None,
) -> Curves | None:
    """Return curves over phases of the fields that any record has, or None.

    Args:
        series: columns may also be functions of a record.
        bands: intervals by field and phase, for fields without their own.
    """
    phases, curves, ends = [at.phase for at in records], {}, {}
    for label, column in columns_by_label(series).items():
        known = [read_column(at, column(at) if callable(column) else column) for at in records]
        if all(x is None for x, *_ in known):
            continue
        curves[label] = phases, [x for x, *_ in known]
        given = (bands or {}).get(column, {}) if isinstance(column, str) else {}
        pairs = [given.get(p, (a, b)) for p, (_, a, b) in zip(phases, known, strict=True)]
        if any(None not in pair for pair in pairs):
            ends[label] = tuple(map(list, zip(*pairs, strict=True)))
    return Curves(curves, title, unit, ends, note=note) if curves else None


def cell(field: str, *index: int) -> Callable[[Snapshot], tuple[Any, ...]]:
    """Return a column for `curves_over`: one entry of a field of lists, and its ends."""

    def read(at: Snapshot) -> tuple[Any, ...]:
        found = [at.get(field + end) for end in ENDS]
        for i in index:
            found = [None if x is None else x[i] for x in found]
        return tuple(found)

    return read


def matrix(
    at: Snapshot,
    title: str,
    values: Column,
    rows: Sequence[str],
    cols: Sequence[str],
    unit: str = "",
    kind: Kind = "sequential",
    limits: tuple[float, float] | None = None,
    held: int | None = None,
    note: str = "",
) -> Matrix | None:
    """Return a grid of a record, or None without the field; None in it stays blank.

    Args:
        held: number of held-out sequences, for a note on the best of all cells.
    """
    grid, low, high = read_column(at, values)
    if grid is None:
        return None
    ends = None if low is None else (low, high)
    cells = [(x, i, j) for i, row in enumerate(grid) for j, x in enumerate(row) if x is not None]
    cells = [cell for cell in cells if ends and cell[1] < len(low)]
    if held and cells:
        best, i, j = max(cells)
        note = (
            f"Best of the {len(cells)} compared: {bracketed(best, low[i][j], high[i][j])} at "
            f"{rows[i]}, {cols[j]} (95 %, bootstrap over {held} held-out sequences). {note}"
        )
    title = f"phase {at.phase}: {title}"
    return Matrix(grid, rows, cols, title, unit, kind, limits, note, ends)


def record_table(at: Snapshot, title: str, series: Series, note: str = "") -> Table | None:
    """Return columns of a record as a table with intervals in brackets, or None."""
    columns = known_columns(at, series)
    cells = [
        x if low is None else [bracketed(*each) for each in zip(x, low, high, strict=True)]
        for x, low, high in columns.values()
    ]
    rows = list(zip(*cells, strict=True))
    title = f"phase {at.phase}: {title}"
    return Table(list(columns), rows, title, word_columns(rows), note) if rows else None


def row_table(
    at: Snapshot, title: str, field: str, order: str = "", top: int = MOST_ROWS, note: str = ""
) -> Table | None:
    """Return a list of dicts of a record as a table, by size of `order`, without nested values."""
    found = at.get(field) or ()
    names = dict.fromkeys(
        k for row in found for k, x in row.items() if not isinstance(x, list | dict)
    )
    ranked = sorted(found, key=lambda row: -abs(row[order])) if order else found
    labels, rows = rows_of_dicts(ranked[:top], list(names))
    note += f" The {top} largest of {len(found)}." if len(found) > top else ""
    title = f"phase {at.phase}: {title}"
    return Table(labels, rows, title, word_columns(rows), note) if rows else None


def rows_of_dicts(
    dicts: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[str], list[list[object]]]:
    """Return labels and rows of the named entries; ends of intervals become brackets."""
    ends = {k: (f"{k}_low", f"{k}_high") for k in names if f"{k}_low" in names}
    names = [k for k in names if not any(k in pair for pair in ends.values())]
    read = lambda row, k: bracketed(*map(row.get, (k, *ends[k]))) if k in ends else row.get(k)
    rows = [[_quoted(read(row, k)) for k in names] for row in dicts]
    return [name.replace("_", " ") for name in names], rows


def _quoted(x: object) -> object:
    return repr(x) if isinstance(x, str) and x != x.strip() else x


def word_columns(rows: Sequence[Sequence[object]]) -> tuple[int, ...]:
    """Return the columns that have words instead of numbers."""
    is_word = lambda x: isinstance(x, str) and not x[:1].isdigit() and x[:1] not in "-–−"
    return tuple(i for i, cells in enumerate(zip(*rows, strict=True)) if any(map(is_word, cells)))


def strip(
    at: Snapshot,
    title: str,
    values: Column,
    unit: str = "",
    kind: Kind = "diverging",
    mask: str = "mask",
    top: int | None = None,
    rewards: Iterable[float] = (),
    note: str = "",
) -> Strip | None:
    """Return generated tokens with their values, or None without the field; prompts have none.

    Args:
        top: number of texts, those of the largest sums of sizes; all by default.
    """
    (found, *_), tokens, names = read_column(at, values), at["tokens"], list(rewards)
    if found is None:
        return None
    rows = []
    for i, (numbers, counts) in enumerate(zip(found, at[mask], strict=True)):
        known = [x if real else None for x, real in zip(numbers, counts, strict=True)]
        prompt = [None] * (len(tokens[i]) - len(known))
        label = f"text {i}" + (f", reward {names[i]:.4g}" if names else "")
        rows.append((label, tokens[i], prompt + known))
    if top is not None:
        rows = sorted(rows, key=lambda row: -sum(abs(x or 0.0) for x in row[2]))[:top]
    return Strip(rows, f"phase {at.phase}: {title}", unit, kind, note=note)
