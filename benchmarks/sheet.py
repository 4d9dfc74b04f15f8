"""A table of figures, for the terminal and for a page in Markdown."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table


class Sheet(NamedTuple):
    """A table: its first columns are text, the others are numbers.

    Args:
        texts: how many columns are text.
        title: stands above it.
        note: stands below it.
    """

    head: Sequence[str]
    body: Iterable[Sequence[str]]
    title: str = ""
    note: str = ""
    texts: int = 1

    def markdown(self) -> str:
        """Title, table and note as Markdown."""
        lines = [
            self.head,
            ["---" if i < self.texts else "---:" for i in range(len(self.head))],
            *self.body,
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(filter(None, (self.title, table, self.note))) + "\n"

    def rich(self) -> Table:
        """The same for a terminal."""
        first, *others = self.head
        columns = (Column(name, justify="right") for name in others)
        title, note = self.title or None, self.note or None
        table = Table(Column(first, no_wrap=True), *columns, box=SIMPLE_HEAD, pad_edge=False)
        table.title, table.caption = title, note
        for line in self.body:
            table.add_row(*line)
        return table
