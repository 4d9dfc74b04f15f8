"""Predictions: what a learner expected, beside what came out."""

from collections.abc import Collection
from fractions import Fraction

from rich import box
from rich.table import Table
from rich.text import Text

from rlhf_lab.console import page_console
from rlhf_lab.course.display import BAD, GOOD
from rlhf_lab.errors import ConfigError


class UnknownChoice(ConfigError):
    """Ends a notebook's cell at a prediction that is none of its choices; shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Predictions:
    """Collects what a learner predicted and what then came out, and lists the surprises.

    `which = predictions.guess("up", among=["up", "down"])` is a prediction, and
    `predictions.compare("it goes", predicted=which, found="down")` shows it beside the result.
    `predictions.show()` lists them all. What counts is what was predicted when the result was first
    seen.
    """

    def __init__(self) -> None:
        self._compared: dict[str, tuple[object, object]] = {}

    def guess(self, predicted: object, among: Collection[object] | None = None) -> object:
        """A prediction as one of its choices; None where it is left open.

        1. Take 0.5 and "0.5", "38/9" and "38 / 9", "Up" and "up" for the same.
        2. Without choices, take any words: they are shown again, and not judged.

        Args:
            among: the choices; None for a prediction in the learner's own words.

        Raises:
            UnknownChoice: it is none of the choices.
        """
        if predicted is ... or predicted is None:
            return None
        if among is None:
            return str(predicted)
        for choice in among:
            if _same(predicted, choice):
                return choice
        raise UnknownChoice(
            f"{predicted!r:.60} is none of the choices; put one of them in its place: "
            f"{_listed(among)}."
        )

    def compare(self, question: str, predicted: object, found: object) -> None:
        """Note and show one prediction; None (or ...) stands for no prediction.

        The prediction that was there the first time is kept, whatever it says by now.

        Args:
            question: what was asked.
            predicted: a choice.
            found: what came out; a tuple of several where the data cannot rank them, and then each
                of them is right.
        """
        predicted = None if predicted is ... else predicted
        first = self._compared.get(question, (predicted,))[0]
        self._compared[question] = (first, found)
        line = self._line(question)
        if not _same(predicted, first):
            line.append(" (your first prediction is kept)" if first is not None else _TOO_LATE)
        page_console().print(line)

    def _line(self, question: str) -> Text:
        predicted, found = self._compared[question]
        told = f"{question}: {_said(found)}"
        if predicted is None:
            return Text(f"{told} (you made no prediction)")
        if _hit(predicted, found):
            return Text.assemble(f"{told}, ", ("as you predicted", GOOD))
        return Text.assemble(f"{told}, ", (f"a surprise, you predicted {predicted}", BAD))

    def recall(self, question: str, predicted: object) -> None:
        """Show again what was predicted in words, which the learner is the judge of."""
        words = "you wrote nothing down" if predicted in (None, ...) else f"you wrote: {predicted}"
        page_console().print(Text(f"{question}: {words}"))

    def show(self) -> None:
        """List everything that was predicted in this lesson."""
        table = Table("question", "predicted", "found", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for question, (predicted, found) in self._compared.items():
            expected = "-" if predicted is None else str(predicted)
            hit = _hit(predicted, found)
            mark = Text("✓" if hit else "surprise", style=GOOD if hit else BAD)
            table.add_row(question, expected, _said(found), mark if predicted is not None else "")
        page_console().print(table)


_TOO_LATE = " (made after the result was shown, so it does not count)"


def _hit(predicted: object, found: object) -> bool:
    """Whether a prediction is what came out, or one of several that cannot be ranked."""
    return any(_same(predicted, one) for one in (found if isinstance(found, tuple) else (found,)))


def _said(found: object) -> str:
    """What came out, in words."""
    return " or ".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _same(one: object, other: object) -> bool:
    """Whether two answers are the same number, or the same words but for case and spaces."""
    if one is None or other is None:
        return one is other
    numbers = _number(one), _number(other)
    if None not in numbers:
        return abs(numbers[0] - numbers[1]) < 1e-3
    return _plain(one) == _plain(other)


def _listed(among: Collection[object]) -> str:
    if isinstance(among, range):
        return f"a whole number from {among[0]} to {among[-1]}"
    return ", ".join(repr(choice) for choice in among)


def _plain(answer: object) -> str:
    return "".join(str(answer).casefold().replace('"', "").replace("'", "").split())


def _number(answer: object) -> float | None:
    """A number, or a fraction such as "38 / 9", as a float; None for other words."""
    text = _plain(answer)
    try:
        return float(Fraction(text) if "/" in text else text)
    except (ValueError, ZeroDivisionError):
        return None
