"""Lesson 05, the objective: the adaptive KL controller."""

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.objective import LESSON
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


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=AdaptiveKLController,
        difficulty=2,
        minutes=10,
        hints=(
            "How far is the measured KL from the target, as a share of the target? The coefficient "
            "grows or shrinks by a part of that share.",
            "All are plain numbers. error is 0 on target, 0.5 at one and a half times the target, "
            "and counts as MAX_ERROR at most, either way. Keep the new coefficient in "
            "self.kl_coef, and return it.",
            "error = min(max(kl_per_sequence / self.target - 1, -MAX_ERROR), MAX_ERROR), then "
            "self.kl_coef *= 1 + error * n_sequences / self.horizon.",
        ),
        cases=_controller_cases,
        methods=("update",),
        observe=_observe_controller,
        slips=(
            Slip(
                "the wrong unit: kl_per_sequence is a mean over the sequences already, and stays "
                "as it is",
                {"kl_per_sequence / self.target": "kl_per_sequence / n_sequences / self.target"},
            ),
            Slip(
                "the error is not limited to MAX_ERROR either way",
                {
                    "min(max(kl_per_sequence / self.target - 1, -MAX_ERROR), MAX_ERROR)": ""
                    "kl_per_sequence / self.target - 1"
                },
            ),
            Slip(
                "the error is limited above, but not below",
                {
                    "min(max(kl_per_sequence / self.target - 1, -MAX_ERROR), MAX_ERROR)": ""
                    "min(kl_per_sequence / self.target - 1, MAX_ERROR)"
                },
            ),
            Slip(
                "the sign is the other way round: a KL above the target raises the coefficient",
                {"kl_per_sequence / self.target - 1,": "1 - kl_per_sequence / self.target,"},
            ),
            Slip(
                "the error is in nats: take it as a share of the target",
                {"kl_per_sequence / self.target - 1,": "kl_per_sequence - self.target,"},
            ),
            Slip(
                "the horizon is not used: a batch moves the coefficient by error * n_sequences / "
                "horizon",
                {"error * n_sequences / self.horizon": "error"},
            ),
            Slip(
                "n_sequences and horizon are swapped: a longer horizon makes smaller steps",
                {"n_sequences / self.horizon": "self.horizon / n_sequences"},
            ),
            Slip(
                "the change is added to the coefficient: multiply by 1 + change",
                {"self.kl_coef *= 1 + error": "self.kl_coef += error"},
            ),
            Slip(
                "the new coefficient is returned, but not kept in self.kl_coef",
                {
                    "self.kl_coef *= 1 + error * n_sequences / self.horizon\n"
                    "        return self.kl_coef": "return self.kl_coef * (1 + error * "
                    "n_sequences / self.horizon)"
                },
            ),
            Slip(
                "update returns nothing: return the new coefficient",
                {"        return self.kl_coef": ""},
            ),
        ),
    ),
)
