"""Lesson 05, the objective: the policy ratio, PPO's clipped surrogate, and the value loss."""

from rlhf_lab.course.cases import draw, half_precision, standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import (
    calc_clipped_surrogate_objective,
    calc_value_function_loss,
    policy_ratio,
)


def _surrogate_cases() -> tuple[Case, ...]:
    fn, large = calc_clipped_surrogate_objective, {"logprobs": 100.0}
    spoil = ("logprobs", "old_logprobs", "advantages")
    whitened = standard_cases(fn, large=large, spoil=spoil, clip_coef=0.2)
    return whitened + standard_cases(fn, clip_coef=0.3, normalize=False)


def _value_loss_cases() -> tuple[Case, ...]:
    fn, sizes = calc_value_function_loss, {"batch": 3, "gen": 4}
    spoil = ("values", "returns")
    plain = standard_cases(fn, large={"values": 1e4}, spoil=spoil, vf_coef=0.3)
    clipped = draw(fn, sizes, 9, {"vf_coef": 0.3, "clip": 0.2}, optional=("old_values",))
    masked = draw(fn, sizes, 10, {"vf_coef": 0.3, "clip": 0.2}, optional=("old_values", "mask"))
    half = draw(fn, sizes, 11, {"vf_coef": 0.3})
    half |= {name: (300 * half[name]).half() for name in ("values", "returns")}
    return (
        *plain,
        Case("clipped", clipped),
        Case("clipped and masked", masked),
        Case("a clip of 0", clipped | {"clip": 0.0}),
        Case("large in half precision", half),
    )


_exercise = exercise_from("losses.toml")

EXERCISES = (
    _exercise(
        policy_ratio,
        cases=lambda: (
            *standard_cases(policy_ratio, large={"logprobs": 200.0}),
            half_precision(policy_ratio, "logprobs", "old_logprobs"),
        ),
    ),
    _exercise(calc_clipped_surrogate_objective, cases=_surrogate_cases),
    _exercise(calc_value_function_loss, cases=_value_loss_cases),
)
