"""A table of text and numbers, for the terminal and for a page in Markdown."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table


class Sheet(NamedTuple):
    """A table with a note below; its first `texts` columns are text."""

    head: Sequence[str]
    body: Iterable[Sequence[str]]
    note: str = ""
    texts: int = 1

    def markdown(self) -> str:
        """Format as Markdown."""
        rule = ["---" if i < self.texts else "---:" for i in range(len(self.head))]
        table = "\n".join(f"| {' | '.join(line)} |" for line in [self.head, rule, *self.body])
        return "\n\n".join(filter(None, (table, self.note))) + "\n"

    def rich(self) -> Table:
        """Format for a terminal."""
        first, *others = self.head
        columns = (Column(name, justify="right") for name in others)
        table = Table(Column(first, no_wrap=True), *columns, box=SIMPLE_HEAD, pad_edge=False)
        table.caption = self.note or None
        for line in self.body:
            table.add_row(*line)
        return table
