"""Lesson 05, the objective: the adaptive KL controller."""

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.training import AdaptiveKLController


def _controller_cases() -> tuple[Case, ...]:
    fields = {"kl_coef": 0.2, "target": 4.0, "horizon": 1000, "n_sequences": 128}
    kls = {
        "near the target": (4.2, 3.9, 4.0, 3.4),
        "the first phase has KL 0": (0.0, 0.4),
        "far above the target": (40.0, 9.0),
        "above, then below": (5.0, 3.0, 4.5),
    }
    cases = [Case(label, fields | {"kls": column}) for label, column in kls.items()]
    short = fields | {"horizon": 64, "target": 0.3, "kls": (0.31, 0.27, 2.0)}
    return (*cases, Case("a horizon shorter than a batch", short))


def _observe_controller(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What update returns after each batch, and what the controller then holds."""
    controller = build(**{name: arguments[name] for name in ("kl_coef", "target", "horizon")})
    facts = {}
    for batch, kl in enumerate(arguments["kls"], start=1):
        returned = controller.update(kl, arguments["n_sequences"])
        facts[f"returned after batch {batch} (KL {kl})"] = returned
        facts[f"kl_coef after batch {batch} (KL {kl})"] = controller.kl_coef
    return facts


_exercise = exercise_from("kl_control.toml")

EXERCISES = (_exercise(AdaptiveKLController, cases=_controller_cases, observe=_observe_controller),)
