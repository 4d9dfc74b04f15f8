"""Exercises on PPO: the learner's own alarm for broken trainers, checked on stored runs."""

from typing import Any

from rlhf_lab.course.cases import Cases
from rlhf_lab.course.dashboards import stored_dashboards
from rlhf_lab.course.exercise import Answer, make_exercise


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


def _run_cases() -> Cases:
    kinds = list(stored_dashboards())
    reverse = {"kinds": kinds[::-1]}
    return {"27 stored runs": {"kinds": kinds}, "the same in another order": reverse}


def _observe_alarm(fn: Answer, kinds: list[str]) -> dict[str, Any]:
    stored = stored_dashboards()
    answers = {kind: [fn(numbers) for numbers in stored[kind]] for kind in kinds}
    if not all(isinstance(answer, bool) for kind in kinds for answer in answers[kind]):
        return {"it answers True or False": False}
    facts: dict[str, Any] = {"it answers True or False": True}
    for kind in ("healthy", *sorted(set(kinds) - {"healthy"})):
        where = "nothing is wrong" if kind == "healthy" else kind
        facts[f"it goes off, of {len(answers[kind])}, where {where}"] = sum(answers[kind])
    return facts | {"the numbers are left as they are": stored == stored_dashboards()}


EXERCISES = (make_exercise(alarm, _run_cases, _observe_alarm),)
