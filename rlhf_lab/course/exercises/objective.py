"""Exercises on the objective: its four terms, the whole of it, and the adaptive KL controller."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.course.cases import (
    Cases,
    Draws,
    draw,
    filtered,
    half_precision,
    standard_cases,
    with_log_probs,
)
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.functional import (
    calc_clipped_surrogate_objective,
    calc_entropy_bonus,
    calc_kl_penalty,
    calc_value_function_loss,
    entropy_per_token,
    kl_of_later_states,
    policy_ratio,
    sequence_sum,
)
from rlhf_lab.training import AdaptiveKLController


def _sum_cases() -> Cases:
    x = draw(sequence_sum, {"batch": 3, "gen": 4}, 9)["x"]
    x[1, 2] = float("nan")
    cases = standard_cases(sequence_sum, large={"x": 1e30}, spoil=("x",))
    return cases | {"nan at a real token": {"x": x}}


def _entropy_cases() -> Cases:
    cases = standard_cases(entropy_per_token, large={"logprobs": 1e3})
    cases |= filtered(entropy_per_token, "logprobs")
    return with_log_probs(cases | {"1,000 words": {"logprobs": Draws(11).normal(2, 3, 1000)}})


def _bonus_cases() -> Cases:
    large = {"entropy": 1e3}
    return standard_cases(calc_entropy_bonus, large=large, spoil=("entropy",), ent_coef=0.4)


def _ratio_cases() -> Cases:
    halves = half_precision(policy_ratio, "logprobs", "old_logprobs")
    return standard_cases(policy_ratio, large={"logprobs": 200.0}) | halves


def _surrogate_cases() -> Cases:
    fn, large = calc_clipped_surrogate_objective, {"logprobs": 100.0}
    spoil = ("logprobs", "old_logprobs", "advantages")
    plain = {"clip_coef": 0.3, "normalize": False, "suffix": ", advantages as they are"}
    return standard_cases(fn, large=large, spoil=spoil, clip_coef=0.2) | standard_cases(fn, **plain)


def _value_loss_cases() -> Cases:
    fn, sizes, coef = calc_value_function_loss, {"batch": 3, "gen": 4}, {"vf_coef": 0.3}
    clip, names = coef | {"clip": 0.2}, ("values", "returns")
    clipped = draw(fn, sizes, 9, clip, optional=("old_values",))
    half = draw(fn, sizes, 11, coef)
    return standard_cases(fn, large={"values": 1e4}, spoil=names, **coef) | {
        "clipped": clipped,
        "clipped and masked": draw(fn, sizes, 10, clip, optional=("old_values", "mask")),
        "a clip of 0": clipped | {"clip": 0.0},
        "large in half precision": half | {name: (300 * half[name]).half() for name in names},
    }


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
    """Compute the objective of a minibatch, which is maximized; its terms average over real tokens.

    J = L_clip - L_V + c_H H - beta KL
    """
    surrogate = calc_clipped_surrogate_objective(
        logprobs, old_logprobs, advantages, clip_coef, mask
    )
    value_loss = calc_value_function_loss(values, returns, vf_coef, mask)
    entropy_bonus = calc_entropy_bonus(entropy, ent_coef, mask)
    kl_penalty = calc_kl_penalty(kl, kl_coef, mask)
    return surrogate - value_loss + entropy_bonus - kl_penalty


def _penalty_cases() -> Cases:
    return standard_cases(calc_kl_penalty, large={"kl": 1e3}, spoil=("kl",), kl_coef=0.7)


def _whole_cases() -> Cases:
    coefs = {"clip_coef": 0.2, "vf_coef": 0.7, "ent_coef": 0.5, "kl_coef": 0.3}
    return standard_cases(whole_objective, **coefs)


def _controller_cases() -> Cases:
    fields = {"kl_coef": 0.2, "target": 4.0, "horizon": 1000}
    return {
        "near the target": fields | {"kls": (4.2, 3.9, 4.0, 3.4)},
        "the first phase has KL 0": fields | {"kls": (0.0, 0.4)},
        "far above the target": fields | {"kls": (40.0, 9.0)},
        "above, then below": fields | {"kls": (5.0, 3.0, 4.5)},
        "a horizon shorter than a batch": {"kl_coef": 0.2, "target": 0.3, "horizon": 64}
        | {"kls": (0.31, 0.27, 2.0)},
    }


def _observe_controller(build: Answer, kls: tuple[float, ...], **fields: Any) -> dict[str, Any]:
    controller, facts = build(**fields), {}
    for batch, kl in enumerate(kls, start=1):
        facts[f"returned after batch {batch} (KL {kl})"] = controller.update(kl, 128)
        facts[f"kl_coef after batch {batch} (KL {kl})"] = controller.kl_coef
    return facts


EXERCISES = (
    make_exercise(calc_kl_penalty, _penalty_cases),
    make_exercise(calc_clipped_surrogate_objective, _surrogate_cases),
    make_exercise(whole_objective, _whole_cases),
    make_exercise(
        kl_of_later_states,
        lambda: standard_cases(kl_of_later_states, spoil=("logprobs", "kl")),
    ),
    make_exercise(AdaptiveKLController, _controller_cases, _observe_controller),
    make_exercise(sequence_sum, _sum_cases),
    make_exercise(entropy_per_token, _entropy_cases),
    make_exercise(calc_entropy_bonus, _bonus_cases),
    make_exercise(policy_ratio, _ratio_cases),
    make_exercise(calc_value_function_loss, _value_loss_cases),
)
