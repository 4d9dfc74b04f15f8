"""Predictions: what a learner expected, beside what came out."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_lab.course.display import BAD, GOOD


class Predictions:
    """Collects what a learner predicted and what then came out, and lists the surprises.

    `predictions.compare("the KL of a model with itself", predicted="0", found="0")` shows one
    comparison; `predictions.show()` lists them all.
    """

    def __init__(self) -> None:
        self._compared: dict[str, tuple[object, object]] = {}

    def compare(self, question: str, predicted: object, found: object) -> None:
        """Note and show one prediction; None (or ...) stands for no prediction."""
        predicted = None if predicted is ... else predicted
        self._compared[question] = (predicted, found)
        Console().print(self._line(question))

    def _line(self, question: str) -> Text:
        predicted, found = self._compared[question]
        if predicted is None:
            return Text(f"{question}: {found} (you made no prediction)")
        if predicted == found:
            return Text.assemble(f"{question}: {found}, ", ("as you predicted", GOOD))
        surprise = f"a surprise, you predicted {predicted}"
        return Text.assemble(f"{question}: {found}, ", (surprise, BAD))

    def show(self) -> None:
        """List everything that was predicted in this lesson."""
        table = Table("question", "predicted", "found", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for question, (predicted, found) in self._compared.items():
            expected = "-" if predicted is None else str(predicted)
            hit = predicted == found
            mark = Text("✓" if hit else "surprise", style=GOOD if hit else BAD)
            table.add_row(question, expected, str(found), mark if predicted is not None else "")
        Console().print(table)
