"""Predictions: what a learner expects, next to the result."""

import re
from collections.abc import Collection, Mapping
from fractions import Fraction

from rich import box
from rich.table import Table
from rich.text import Text

from rlhf_lab.console import page_console
from rlhf_lab.course.display import BAD, GOOD, LessonError


class Predictions:
    """A learner's predictions and the results, of which the first prediction counts.

    `which = predictions.guess("up", among=["up", "down"])` is a prediction, and
    `predictions.compare("it goes", predicted=which, found="down")` shows it next to the result.
    `predictions.show()` lists them all.
    """

    def __init__(self) -> None:
        self._compared: dict[str, tuple[object, object]] = {}

    def guess(self, predicted: object, among: Collection[object] | None = None) -> object:
        """Return a prediction as one of its choices; None if it is left open.

        0.5 and "0.5", "38/9" and "38 / 9", "Up" and "up" are the same.

        Args:
            among: the choices; None for a prediction in the learner's own words.

        Raises:
            LessonError: If the prediction is not a choice.
        """
        if predicted is ... or predicted is None:
            return None
        if among is None:
            return str(predicted)
        for choice in among:
            if _is_same(predicted, choice):
                return choice
        choices = ", ".join(map(repr, among))
        if isinstance(among, range):
            choices = f"the integers from {among[0]} to {among[-1]}"
        raise LessonError(f"{predicted!r:.60} is not a choice. Use one of: {choices}.")

    def compare(
        self,
        question: str,
        predicted: object,
        found: object,
        bins: Mapping[str, float] | None = None,
    ) -> None:
        """Show a prediction next to the result, and keep the first one.

        Args:
            predicted: a choice; None or ... for no prediction.
            found: the result; a tuple if the data cannot rank several, each of which is right; a
                number if there are bins.
            bins: by choice, in ascending order, the limit below which a number is in the bin.

        Raises:
            LessonError: If the number is in no bin.
        """
        predicted = None if predicted is ... else predicted
        result = _format(found)
        if bins is not None:
            number = float(found)
            found = next((name for name, limit in bins.items() if number < limit), None)
            if found is None:
                raise LessonError(f"{number:.3g} is not in any bin. Set the last limit to inf.")
            result = f"{found} ({number:.3g})"
        first = self._compared.get(question, (predicted,))[0]
        self._compared[question] = (first, found)
        line = Text(f"{question}: {result}")
        if first is None:
            line.append(" (you made no prediction)")
        elif _is_hit(first, found):
            line.append(", ").append("as you predicted", GOOD)
        else:
            line.append(", ").append(f"but you predicted {first}", BAD)
        if first is None and predicted is not None:
            line.append(" (made after the result was shown, so it does not count)")
        elif predicted != first:
            line.append(" (your first prediction is kept)")
        page_console().print(line)

    def recall(self, question: str, predicted: object) -> None:
        """Show a prediction in the learner's own words, who judges it."""
        words = "you wrote nothing down" if predicted in (None, ...) else f"you wrote: {predicted}"
        page_console().print(Text(f"{question}: {words}"))

    def show(self) -> None:
        """List all predictions of this lesson."""
        table = Table("question", "predicted", "found", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for question, (predicted, found) in self._compared.items():
            mark = Text("✓", GOOD) if _is_hit(predicted, found) else Text("surprise", BAD)
            is_open = predicted is None
            row = ["-" if is_open else str(predicted), _format(found), "" if is_open else mark]
            table.add_row(question, *row)
        page_console().print(table)


def _is_hit(predicted: object, found: object) -> bool:
    return any(
        _is_same(predicted, option) for option in (found if isinstance(found, tuple) else (found,))
    )


def _format(found: object) -> str:
    return " or ".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _is_same(one: object, other: object) -> bool:
    texts = [re.sub(r"[\s\"']", "", str(x)).casefold() for x in (one, other)]
    try:
        return abs(Fraction(texts[0]) - Fraction(texts[1])) < 1e-3
    except (ValueError, ZeroDivisionError):
        return texts[0] == texts[1]
