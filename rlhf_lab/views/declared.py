"""Declarations of pictures: which fields of a probe's records go to which picture kind."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.views.color import Kind
from rlhf_lab.views.intervals import bracketed
from rlhf_lab.views.pictures import Bars, Curves, Kinds, Matrix, Picture, Strip, Table

MOST_ROWS = 24  # bars or rows of a table; a model of 30 layers has hundreds of components
Drawn = Kinds | Picture | str


class Snapshot:
    """One record of a probe with its tensors."""

    def __init__(self, run: Run, name: str, record: Mapping[str, Any]) -> None:
        self.run, self.name, self.record = run, name, record

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors stored with the record."""
        return self.run.tensors(self.name, self.record["phase"])

    def __getitem__(self, name: str) -> Any:
        """Return a field of the record, a column of its rows ("rows.norm") or a tensor as lists."""
        if name in self.record:
            return self.record[name]
        rows, _, column = name.partition(".")
        if column and rows in self.record:
            return [row.get(column) for row in self.record[rows]]
        path = self.run.store.tensor_path(self.name, self.record["phase"])
        return self.tensors[name].tolist() if path.is_file() else self.record[name]

    def get(self, wanted: Any, default: Any = None) -> Any:
        """Return a field, or `default` if neither the record nor its tensors have it."""
        try:
            value = wanted(self) if callable(wanted) else self[wanted]
        except KeyError:
            value = default
        return value.tolist() if isinstance(value, Tensor) else value

    def format(self, template: str) -> str:
        """Fill a template with fields of the record; n is the number of sequences."""
        counts = self.record.get("sequences")
        held = counts.get("held") if isinstance(counts, dict) else counts
        known = {"n": self.record.get("held_out", held)} | dict(self.record)
        return template.format_map(known | {"step": self.record.get("step", 0) + 1})


Field = str | Callable[[Snapshot], Any]
Column = Field | tuple[Field, Field, Field]  # the values, and the ends of their intervals
Columns = str | Mapping[str, Any] | Callable[[Snapshot], Mapping[str, Any]]


def named(columns: str) -> dict[str, Column]:
    """Return columns of "LABEL: FIELD" or "LABEL: FIELD LOW HIGH", between semicolons.

    A label may be left out; it is the field's name with spaces, without its list.
    """
    found: dict[str, Column] = {}
    for part in columns.split("; "):
        label, _, fields = part.rpartition(": ")
        name = fields.rpartition(".")[2].replace("_", " ")
        found[label or name] = tuple(fields.split()) if " " in fields else fields
    return found


def _columns_by_label(columns: Columns, at: Snapshot) -> Mapping[str, Any]:
    if isinstance(columns, str):
        return named(columns)
    return columns(at) if callable(columns) else columns


def _column(at: Snapshot, column: Any) -> tuple[Any, Any, Any]:
    """Values and ends of a column; a field NAME has its ends in NAME_low and NAME_high."""
    if isinstance(column, tuple):
        return tuple(at.get(part) for part in column)
    if isinstance(column, str):
        value, low, high = (at.get(column + end) for end in ("", "_low", "_high"))
        has_ends = "." not in column and low is not None and high is not None
        return (value, low, high) if has_ends else (value, None, None)
    return at.get(column if callable(column) else lambda _: column), None, None


def _columns(at: Snapshot, columns: Columns) -> dict[str, tuple[Any, Any, Any]]:
    """The columns that the record has, by label."""
    known = _columns_by_label(columns, at).items()
    found = {at.format(label): _column(at, column) for label, column in known}
    return {label: column for label, column in found.items() if column[0] is not None}


@dataclass(frozen=True)
class _Declared:
    over_phases = False

    def named(self, at: Snapshot) -> dict[str, str]:
        """Title, unit and note of the drawn picture."""
        before = "" if self.over_phases else f"phase {at.record['phase']}: "
        return {"title": before + at.format(self.title), "note": at.format(self.note)}

    def drawn(self, *seen: Any) -> Iterable[Drawn]:
        """Return the picture of one record, or of all records with their bands, if there is one."""
        return filter(None, [(self.draw_over if self.over_phases else self.draw)(*seen)])


@dataclass(frozen=True)
class BarsOf(_Declared):
    """Bars of fields of one record, one label each; of many, those of the largest sizes."""

    title: str
    by: Field
    series: Columns
    unit: str = ""
    note: str = ""
    top: int = MOST_ROWS

    def draw(self, at: Snapshot) -> Bars | None:
        """Return the bars, or None if the record lacks the fields."""
        labels, columns = at.get(self.by), _columns(at, self.series)
        if not columns or not labels:
            return None
        sizes = [max(abs(x[i] or 0.0) for x, *_ in columns.values()) for i in range(len(labels))]
        kept = sorted(sorted(range(len(labels)), key=lambda i: -sizes[i])[: self.top])
        named, rest = self.named(at), set(range(len(labels))) - set(kept)
        if rest:
            sums = (
                f"{name} {sum(x[i] or 0.0 for i in rest):+.3g}" for name, (x, *_) in columns.items()
            )
            named["note"] += f" {len(rest)} others sum to {', '.join(sums)}."
        pick = lambda values: [values[i] for i in kept]
        return Bars(
            [str(labels[i]) for i in kept],
            {name: pick(x) for name, (x, *_) in columns.items()},
            unit=self.unit,
            ends={name: (pick(a), pick(b)) for name, (_, a, b) in columns.items() if a and b},
            **named,
        )


@dataclass(frozen=True)
class CurvesOf(_Declared):
    """Curves of fields of one record along a field `x`, or along 0, 1, 2, ..."""

    title: str
    series: Columns
    unit: str = ""
    note: str = ""
    x: Field | None = None
    x_label: str = ""

    def draw(self, at: Snapshot) -> Curves | None:
        """Return the curves, or None if the record lacks the fields."""
        columns = _columns(at, self.series)
        place = lambda values: at.get(self.x) if self.x else list(range(len(values)))
        series = {name: (place(x), x) for name, (x, *_) in columns.items()}
        ends = {name: (a, b) for name, (_, a, b) in columns.items() if a and b}
        named = self.named(at) | {"x_label": at.format(self.x_label)}
        return Curves(series, unit=self.unit, ends=ends, **named) if series else None


@dataclass(frozen=True)
class MatrixOf(_Declared):
    """A grid of one record's field; entries that are None stay blank."""

    title: str
    values: Field
    rows: Field
    cols: Field
    unit: str = ""
    note: str = ""
    kind: Kind = "sequential"
    limits: tuple[float, float] | None = None

    def draw(self, at: Snapshot) -> Matrix | None:
        """Return the grid, or None if the record lacks the field."""
        grid, rows = at.get(self.values), at.get(self.rows)
        if grid is None or rows is None:
            return None
        cols = at.get(self.cols) or ()
        return Matrix(
            grid, rows, cols, unit=self.unit, kind=self.kind, limits=self.limits, **self.named(at)
        )


@dataclass(frozen=True)
class TableOf(_Declared):
    """Fields of one record as columns of a table; of many rows, those of the largest `order`."""

    title: str
    columns: Columns
    note: str = ""
    order: Field | None = None
    top: int = MOST_ROWS

    def draw(self, at: Snapshot) -> Table | None:
        """Return the table, or None if the record lacks the fields."""
        columns = _columns(at, self.columns)
        cells = {name: _cells(*column) for name, column in columns.items()}
        rows = [list(row) for row in zip(*cells.values(), strict=True)]
        named, n = self.named(at), len(rows)
        if self.order and n > self.top:
            sizes = at.get(self.order)
            order = sorted(range(n), key=lambda i: -abs(sizes[i] or 0.0))[: self.top]
            rows = [rows[i] for i in order]
            named["note"] += f" The {self.top} largest of {n}."
        words = tuple(i for i, column in enumerate(zip(*rows, strict=True)) if _has_words(column))
        return Table(list(cells), rows, words=words, **named) if rows else None


def _has_words(column: Iterable[object]) -> bool:
    return any(isinstance(x, str) and not x[:1].isdigit() and x[:1] not in "-–−" for x in column)


def _cells(
    values: Sequence[Any], low: Sequence[Any] | None, high: Sequence[Any] | None
) -> list[Any]:
    if not low or not high:
        return list(values)
    return [bracketed(*cell) for cell in zip(values, low, high, strict=True)]


@dataclass(frozen=True)
class StripOf(_Declared):
    """Generated tokens colored by a field; the texts of the largest sums, or the first ones."""

    title: str
    values: Field
    unit: str = ""
    note: str = ""
    mask: Field = "mask"
    kind: Kind = "diverging"
    is_ordered: bool = False
    top: int = 3

    def draw(self, at: Snapshot) -> Strip | None:
        """Return the texts, whose prompts have no value, or None if the record lacks the field."""
        values, mask, tokens = (at.get(part) for part in (self.values, self.mask, "tokens"))
        if values is None:
            return None
        known = [
            [x if m else None for x, m in zip(*row, strict=True)]
            for row in zip(values, mask, strict=True)
        ]
        order = list(range(len(tokens)))
        if self.is_ordered:
            order.sort(key=lambda i: -sum(abs(x or 0.0) for x in known[i]))
        rows = [
            (f"text {i}", tokens[i], [None] * (len(tokens[i]) - len(known[i])) + known[i])
            for i in order[: self.top]
        ]
        return Strip(rows, unit=self.unit, kind=self.kind, **self.named(at))


@dataclass(frozen=True)
class CurvesOver(_Declared):
    """Curves of numbers over all phases that have a record."""

    title: str
    series: Columns
    unit: str = ""
    note: str = ""
    over_phases = True

    def draw_over(self, records: Sequence[Snapshot], bands: Mapping[str, Any]) -> Curves | None:
        """Return the curves of the fields that any record has."""
        phases, series, ends = [at.record["phase"] for at in records], {}, {}
        for label, column in _columns_by_label(self.series, records[-1]).items():
            known = [_column(at, column) for at in records]
            values, low, high = (list(part) for part in zip(*known, strict=True))
            if any(x is not None for x in values):
                given = bands.get(column, {}) if isinstance(column, str) else {}
                pairs = [
                    given.get(p, ends)
                    for p, ends in zip(phases, zip(low, high, strict=True), strict=True)
                ]
                series[label] = phases, values
                if any(a is not None and b is not None for a, b in pairs):
                    ends[label] = tuple(map(list, zip(*pairs, strict=True)))
        return (
            Curves(series, unit=self.unit, ends=ends, **self.named(records[-1])) if series else None
        )


@dataclass(frozen=True)
class MatrixOver(_Declared):
    """A field of every record as a row of a grid."""

    title: str
    values: Field
    cols: Field
    unit: str = ""
    note: str = ""
    over_phases = True

    def draw_over(self, records: Sequence[Snapshot], bands: Mapping[str, Any]) -> Matrix:
        """Return the grid, one row per phase."""
        grid = [at.get(self.values) for at in records]
        rows = [f"phase {at.record['phase']}" for at in records]
        cols = max((at.get(self.cols) or () for at in records), key=len)  # lengths may differ
        return Matrix(grid, rows, cols, unit=self.unit, **self.named(records[-1]))


@dataclass(frozen=True)
class TableOver(_Declared):
    """A row of numbers and words per record."""

    title: str
    columns: Columns
    note: str = ""
    over_phases = True

    def draw_over(self, records: Sequence[Snapshot], bands: Mapping[str, Any]) -> Table:
        """Return the table, one row per phase."""
        named = _columns_by_label(self.columns, records[-1])
        known = [[_column(at, column) for column in named.values()] for at in records]
        rows = [
            [x if low is None else bracketed(x, low, high) for x, low, high in row] for row in known
        ]
        return Table(list(named), rows, words=(), **self.named(records[-1]))


@dataclass(frozen=True)
class Calls(_Declared):
    """A function for pictures that no declaration can describe."""

    function: Callable[..., Iterable[Drawn]]
    over_phases: bool = False

    def drawn(self, seen: Any, *_: Any) -> Iterable[Drawn]:
        """Return the pictures of one record or of all records."""
        return filter(None, self.function(seen))


@dataclass(frozen=True)
class Note(_Declared):
    """A sentence that is filled with fields of the record."""

    text: str
    over_phases: bool = False

    def draw(self, at: Snapshot) -> str | None:
        """Return the sentence, or None if the record lacks a field of it."""
        try:
            return at.format(self.text)
        except KeyError:
            return None

    def draw_over(self, records: Sequence[Snapshot], bands: Mapping[str, Any]) -> str | None:
        """Return the sentence about the last record."""
        return self.draw(records[-1])
