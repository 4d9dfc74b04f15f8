"""Lesson 06, PPO: an alarm of the learner's own, which is held to stored runs, not to numbers."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_lab.course.dashboards import stored_dashboards
from rlhf_lab.course.exercise import Case, exercise_from


def alarm(numbers: dict[str, list[float]]) -> bool:
    """Whether the dashboard of a finished run shows that a part of the trainer is broken.

    `numbers` has one list for each line of the dashboard, with a number for each phase: "reward",
    "KL per sequence", "KL penalty", "entropy", "explained variance", "value loss", "first ratio",
    "clipped" and "gradient norm".
    """
    reward, value_loss = numbers["reward"], numbers["value loss"]
    signs = (
        max(abs(ratio - 1) for ratio in numbers["first ratio"]) > 0.01,
        min(numbers["KL penalty"]) < 0,
        max(numbers["KL per sequence"]) == 0,
        numbers["explained variance"][-1] < 0.1,
        value_loss[-1] > 3 * value_loss[0],
        reward[-1] < reward[0] + 0.1,
    )
    return any(signs)


def _runs() -> tuple[Case, ...]:
    return (
        Case("27 stored runs", {"kinds": tuple(stored_dashboards())}),
        Case("the same in another order", {"kinds": tuple(reversed(stored_dashboards()))}),
    )


def _observe_alarm(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of each kind, at how many runs it goes off, and whether it leaves its argument as it is."""
    stored, untouched, answers = stored_dashboards(), stored_dashboards(), {}
    for kind in arguments["kinds"]:
        answers[kind] = [fn(numbers) for numbers in stored[kind]]
    if not all(isinstance(answer, bool) for given in answers.values() for answer in given):
        return {"it answers True or False": False}
    facts: dict[str, Any] = {"it answers True or False": True}
    for kind in sorted(answers, key=lambda kind: (kind != "healthy", kind)):
        rung = sum(answers[kind])
        facts[f"it goes off, of {len(stored[kind])}, where {_in_words(kind)}"] = rung
    return facts | {"the numbers are left as they are": stored == untouched}


def _in_words(kind: str) -> str:
    return "nothing is wrong" if kind == "healthy" else kind


class _Read(dict):
    """A dashboard that notes which of its lines are read."""

    def __init__(self, numbers: Mapping[str, Sequence[float]]) -> None:
        super().__init__(numbers)
        self.read: dict[str, None] = {}

    def __getitem__(self, line: str) -> Any:
        self.read[line] = None
        return super().__getitem__(line)

    def get(self, line: str, default: Any = None) -> Any:
        """Note the line, as for square brackets."""
        return self[line] if line in self else default

    def values(self) -> Any:
        """All lines, which are noted as read."""
        return [self[line] for line in self]

    def items(self) -> Any:
        """All lines with their names, which are noted as read."""
        return [(line, self[line]) for line in self]


def _read_alarm(fn: Callable[..., Any], case: Case) -> str | None:
    """What is wrong with an alarm: the lines that set it off at healthy runs, or the missing sign.

    1. Note which lines it reads, and at which runs it goes off.
    2. A line of a healthy run sets it off if it falls silent with that line of another run.
    3. A broken kind that it stays silent at is named with the sign that tells it.
    """
    stored, fn = stored_dashboards(), inspect.unwrap(fn)
    runs = [(kind, _Read(numbers)) for kind in stored for numbers in stored[kind]]
    rung = [(kind, numbers, bool(fn(numbers))) for kind, numbers in runs]
    read = list(dict.fromkeys(line for _, numbers in runs for line in numbers.read))
    if not read:
        return f"it {'always' if rung[0][2] else 'never'} goes off, whatever the dashboard shows"
    false = [numbers for kind, numbers, rings in rung if kind == "healthy" and rings]
    silent = dict.fromkeys(kind for kind, _, rings in rung if kind != "healthy" and not rings)
    parts = [_false_alarm(fn, false, read)] if false else []
    if silent:
        missing = [f"{kind} ({TOLD_BY[kind]})" for kind in list(silent)[:2]]
        alone = f"it looks at the {read[0]} alone, and so has " if len(read) == 1 else ""
        parts.append(f"{alone}no sign of: {'; '.join(missing)}")
    return ". Besides, ".join(parts) or None


def _false_alarm(fn: Callable[..., Any], runs: Sequence[_Read], lines: Sequence[str]) -> str:
    others = [numbers for of_kind in stored_dashboards().values() for numbers in of_kind]
    sets = [(line,) for line in lines] + list(itertools.combinations(lines, 2))
    guilty = next((few for few in sets if _silenced(fn, runs[0], few, others)), tuple(lines))
    shown = []
    for line in guilty[:2]:
        values = runs[0][line]
        low, high = min(values), max(values)
        shown.append(
            f"the {line}, which in one of them begins at {values[0]:.7g}, ends at "
            f"{values[-1]:.7g} and lies between {low:.7g} and {high:.7g}"
        )
    return f"it goes off at {len(runs)} of the healthy runs, for {' and '.join(shown)}"


def _silenced(
    fn: Callable[..., Any], run: Mapping[str, Any], lines: Sequence[str], others: Sequence[Any]
) -> bool:
    """Whether an alarm falls silent at a run that has these lines of another one."""
    return any(not fn({**run, **{line: other[line] for line in lines}}) for other in others)


TOLD_BY = {
    "the learning rate is 0": "its KL is 0 in every phase",
    "the log-probabilities are off by one token": "its first ratio is not 1",
    "the advantages have the wrong sign": "its reward falls",
    "the advantages stand one token late": "its value loss grows, and nothing else is unusual",
    "each sequence is given the reward of another one": "its reward does not rise",
    "the value loss has the wrong sign": "its value loss is below 0",
    "the KL penalty has the wrong sign": "its KL penalty is below 0",
    "the reference is not a copy: it learns along": "its KL is 0 in every phase",
}
"""By a broken kind: what tells it."""

_exercise = exercise_from("alarm.toml")

EXERCISES = (_exercise(alarm, cases=_runs, observe=_observe_alarm, reads=_read_alarm),)
