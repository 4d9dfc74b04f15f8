"""Tables of numbers and words, as the lessons show them."""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from rlhf_lab.console import page_console, print_line
from rlhf_lab.functional import Interval


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], digits: int = 3) -> None:
    """Print rows under headings: numbers to the right with so many digits, the rest to the left."""
    rows = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        numbers = all(isinstance(row[i], (int, float)) for row in rows)
        table.add_column(heading, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(_shown(value, digits)) for value in row))
    page_console().print(table)


def show_intervals(
    first: str, columns: Mapping[str, Mapping[str, Interval]], what: str = "texts", digits: int = 2
) -> None:
    """Print estimates by row and column, each with the ends of its interval; below, their n.

    Where columns differ in n, it is said of each column; of unequal rows, the least and the most.
    A row that a column lacks, and an estimate that is undefined, stand as a dash.

    Args:
        first: the heading of the rows' names.
        columns: by heading, intervals by row.
        what: what n counts.
    """
    names = dict.fromkeys(name for column in columns.values() for name in column)
    cell = lambda found: "-" if found is None else _bracketed(found, digits)
    rows = [[name, *(cell(column.get(name)) for column in columns.values())] for name in names]
    show_table([first, *columns], rows)
    of_column = {name: _counts(column.values()) for name, column in columns.items()}
    counts = dict.fromkeys(of_column.values())
    told = "; ".join(f"{n} ({name})" for name, n in of_column.items())
    n = next(iter(counts)) if len(counts) == 1 else told
    said = f"95 % intervals, bootstrap over n = {n} {what}"
    print_line(said, page_console(), "dim")


def _counts(found: Iterable[Interval]) -> str:
    counts = sorted({each.n for each in found})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _bracketed(found: Interval, digits: int) -> str:
    if found.value is None:
        return "-"
    ends = [
        f"{round(end.item(), digits) + 0.0:.{digits}f}"
        for end in (found.low, found.high)
        if end is not None
    ]
    value = f"{round(found.value.item(), digits) + 0.0:.{digits}f}"
    return f"{value} [{', '.join(ends)}]" if ends else value


def _shown(value: object, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}" if isinstance(value, float) else str(value)
