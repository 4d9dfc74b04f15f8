"""Tables of numbers and words, as the lessons show them."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], digits: int = 3) -> None:
    """Print rows under headings: numbers to the right with so many digits, the rest to the left."""
    rows = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        numbers = all(isinstance(row[i], (int, float)) for row in rows)
        table.add_column(heading, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(_shown(value, digits)) for value in row))
    Console().print(table)


def _shown(value: object, digits: int) -> str:
    """A number rounded (a tiny negative one to 0, not -0), or a word as it is."""
    return f"{round(value, digits) + 0.0:.{digits}f}" if isinstance(value, float) else str(value)
