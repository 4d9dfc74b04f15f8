"""Lesson 05, the objective: the whole of it, and what the KL penalty's gradient leaves out."""

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.course.cases import standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import (
    calc_clipped_surrogate_objective,
    calc_entropy_bonus,
    calc_kl_penalty,
    calc_value_function_loss,
    kl_of_later_states,
)


def whole_objective(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    entropy: Float[Tensor, "batch gen"],
    kl: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    clip_coef: float,
    vf_coef: float,
    ent_coef: float,
    kl_coef: float,
) -> Float[Tensor, ""]:
    """The objective of a minibatch, to be maximized: four terms, each a mean over real tokens.

    J = L_clip - L_V + c_H H - beta KL
    """
    surrogate = calc_clipped_surrogate_objective(
        logprobs, old_logprobs, advantages, clip_coef, mask
    )
    value_loss = calc_value_function_loss(values, returns, vf_coef, mask)
    entropy_bonus = calc_entropy_bonus(entropy, ent_coef, mask)
    kl_penalty = calc_kl_penalty(kl, kl_coef, mask)
    return surrogate - value_loss + entropy_bonus - kl_penalty


def _later_cases() -> tuple[Case, ...]:
    return standard_cases(kl_of_later_states, spoil=("logprobs", "kl"))


def _whole_cases() -> tuple[Case, ...]:
    coefs = {"clip_coef": 0.2, "vf_coef": 0.7, "ent_coef": 0.5, "kl_coef": 0.3}
    return standard_cases(whole_objective, **coefs)


_exercise = exercise_from("whole.toml")

EXERCISES = (
    _exercise(kl_of_later_states, cases=_later_cases),
    _exercise(whole_objective, cases=_whole_cases),
)
