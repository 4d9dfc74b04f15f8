"""Lesson 06, PPO: the learner's own alarm for broken trainers, checked on stored runs."""

import inspect
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


def _read_alarm(fn: Callable[..., Any], case: Case) -> str | None:
    fn = inspect.unwrap(fn)
    fired = {kind: [bool(fn(run)) for run in runs] for kind, runs in stored_dashboards().items()}
    false, parts = sum(fired.pop("healthy")), []
    if false:
        parts = [f"it goes off at {false} of the healthy runs: which of their numbers sets it off?"]
    silent = [kind for kind, of_kind in fired.items() if not all(of_kind)][:2]
    if silent:
        parts.append(
            f"no sign of: {'; '.join(f'{kind} ({SIGN_OF_KIND[kind]})' for kind in silent)}"
        )
    return ". ".join(parts) or None


# the sign of each broken kind
SIGN_OF_KIND = {
    "the learning rate is 0": "its KL is 0 in every phase",
    "the log-probabilities are off by one token": "its first ratio is not 1",
    "the advantages have the wrong sign": "its reward falls",
    "the advantages stand one token late": "its value loss grows, and nothing else is unusual",
    "each sequence is given the reward of another one": "its reward does not rise",
    "the value loss has the wrong sign": "its value loss is below 0",
    "the KL penalty has the wrong sign": "its KL penalty is below 0",
    "the reference is not a copy: it learns along": "its KL is 0 in every phase",
}

EXERCISES = (make_exercise(alarm, cases=_runs, observe=_observe_alarm, reads=_read_alarm),)
