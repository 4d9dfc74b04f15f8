"""Lesson 05, the objective: its four terms, the whole of it, and the adaptive KL controller."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.course.cases import draw, filtered, half_precision, standard_cases, with_log_probs
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.functional import (
    calc_clipped_surrogate_objective,
    calc_entropy_bonus,
    calc_kl_penalty,
    calc_value_function_loss,
    entropy_per_token,
    kl_of_later_states,
    policy_ratio,
)
from rlhf_lab.training import AdaptiveKLController


def _many_words() -> Case:
    generator = torch.Generator().manual_seed(11)
    return Case("1,000 words", {"logprobs": torch.randn(2, 3, 1000, generator=generator)})


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
    controller = build(**{name: arguments[name] for name in ("kl_coef", "target", "horizon")})
    facts = {}
    for batch, kl in enumerate(arguments["kls"], start=1):
        returned = controller.update(kl, arguments["n_sequences"])
        facts[f"returned after batch {batch} (KL {kl})"] = returned
        facts[f"kl_coef after batch {batch} (KL {kl})"] = controller.kl_coef
    return facts


EXERCISES = (
    make_exercise(
        entropy_per_token,
        cases=lambda: with_log_probs(
            (
                *standard_cases(entropy_per_token, large={"logprobs": 1e3}),
                filtered(entropy_per_token, "logprobs"),
                _many_words(),
            )
        ),
    ),
    make_exercise(
        calc_entropy_bonus,
        cases=lambda: standard_cases(
            calc_entropy_bonus, large={"entropy": 1e3}, spoil=("entropy",), ent_coef=0.4
        ),
    ),
    make_exercise(
        policy_ratio,
        cases=lambda: (
            *standard_cases(policy_ratio, large={"logprobs": 200.0}),
            half_precision(policy_ratio, "logprobs", "old_logprobs"),
        ),
    ),
    make_exercise(calc_clipped_surrogate_objective, cases=_surrogate_cases),
    make_exercise(calc_value_function_loss, cases=_value_loss_cases),
    make_exercise(kl_of_later_states, cases=_later_cases),
    make_exercise(whole_objective, cases=_whole_cases),
    make_exercise(AdaptiveKLController, cases=_controller_cases, observe=_observe_controller),
)
