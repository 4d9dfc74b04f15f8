"""Tables of numbers, intervals and claims, as the lessons show them."""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from rlhf_lab.console import page_console, print_line
from rlhf_lab.functional import Interval


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], digits: int = 3) -> None:
    """Print rows under headings: numbers right-aligned with so many digits, texts left-aligned."""
    rows = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        is_numeric = all(isinstance(row[i], (int, float)) for row in rows)
        table.add_column(heading, justify="right" if is_numeric else "left")
    for row in rows:
        table.add_row(*(Text(_format(value, digits)) for value in row))
    page_console().print(table)


def show_intervals(
    first: str, columns: Mapping[str, Mapping[str, Interval]], what: str = "texts"
) -> None:
    """Print estimates by row and column, each with the ends of its interval; below, their n.

    Columns of different n are listed with theirs, unequal rows by the smallest and the largest. A
    missing or undefined estimate is a dash.

    Args:
        first: the heading of the rows' names.
        columns: by heading, intervals by row.
        what: what n counts.
    """
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [
        [name, *(_format_interval(column.get(name)) for column in columns.values())]
        for name in names
    ]
    show_table([first, *columns], rows)
    counts = {}
    for name, column in columns.items():
        ns = sorted({interval.n for interval in column.values()})
        counts[name] = str(ns[0]) if len(ns) == 1 else f"{ns[0]} to {ns[-1]}"
    n = "; ".join(f"{count} ({name})" for name, count in counts.items())
    n = next(iter(counts.values())) if len(set(counts.values())) == 1 else n
    print_line(f"95 % intervals, bootstrap over n = {n} {what}", page_console(), "dim")


def _format_interval(interval: Interval | None) -> str:
    if interval is None or interval.value is None:
        return "-"
    ends = [_format(x.item(), 2) for x in (interval.low, interval.high) if x is not None]
    value = _format(interval.value.item(), 2)
    return f"{value} [{', '.join(ends)}]" if ends else value


def _format(value: object, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}" if isinstance(value, float) else str(value)
