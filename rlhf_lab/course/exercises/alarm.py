"""Lesson 06, PPO: the learner's own alarm for broken trainers, checked on stored runs."""

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_lab.course.dashboards import stored_dashboards
from rlhf_lab.course.exercise import Case, make_exercise


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


EXERCISES = (make_exercise(alarm, cases=_runs, observe=_observe_alarm),)
