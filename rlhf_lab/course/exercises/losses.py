"""Lesson 05, the objective: the policy ratio, PPO's clipped surrogate, and the value loss."""

from rlhf_lab.course.cases import draw, half_precision, standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.objective import (
    COEF_MISSING,
    DENOMINATOR_UNUSED,
    DIVIDES_BY_ALL,
    HALF,
    LESSON,
    NOT_BLANKED,
    PADDING_COUNTS,
    TOO_EARLY,
)
from rlhf_lab.functional import (
    calc_clipped_surrogate_objective,
    calc_value_function_loss,
    policy_ratio,
)

LOGPROBS_AS_GIVEN = {
    "zero_masked(logprobs, mask)": "logprobs",
    "zero_masked(old_logprobs, mask)": "old_logprobs",
}
SMALLER_PRODUCT = "torch.minimum(ratio * advantages, clipped_ratio * advantages)"
VALUES_AS_GIVEN = {
    "zero_masked(at_least_float32(values), mask)": "at_least_float32(values)",
    "zero_masked(at_least_float32(returns), mask)": "at_least_float32(returns)",
    "zero_masked(at_least_float32(old_values), mask)": "at_least_float32(old_values)",
}


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
        Case("large in half precision", half),
    )


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=policy_ratio,
        difficulty=1,
        minutes=5,
        hints=(
            "You have log-probabilities, and want a ratio of probabilities: what does a quotient "
            "become under the logarithm?",
            "Everything is [batch gen]. Hold the difference to at most 20 before the exponential.",
            "(logprobs - old_logprobs).clamp(max=20.0).exp()",
        ),
        cases=lambda: (
            *standard_cases(policy_ratio, large={"logprobs": 200.0}),
            half_precision(policy_ratio, "logprobs", "old_logprobs"),
        ),
        gradients=("logprobs",),
        slips=(
            Slip(
                "this is old over new",
                {
                    "at_least_float32(logprobs) - at_least_float32(old_logprobs)": ""
                    "at_least_float32(old_logprobs) - at_least_float32(logprobs)"
                },
            ),
            Slip(
                "this is the logarithm of the ratio: take the exponential",
                {".clamp(max=MAX_LOG_RATIO).exp()": ".clamp(max=MAX_LOG_RATIO)"},
            ),
            Slip(
                "exp overflows float32 at 88: limit the difference to 20 first",
                {".clamp(max=MAX_LOG_RATIO)": ""},
            ),
            Slip(
                HALF,
                {
                    "at_least_float32(logprobs)": "logprobs",
                    "at_least_float32(old_logprobs)": "old_logprobs",
                },
            ),
            Slip(
                "this divides log-probabilities: subtract them, and take the exponential",
                {
                    "at_least_float32(logprobs) - at_least_float32(old_logprobs)": ""
                    "(logprobs / old_logprobs).clamp(min=1e-9).log()"
                },
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=calc_clipped_surrogate_objective,
        difficulty=3,
        minutes=20,
        hints=(
            "Two products per token: advantage times ratio, and advantage times a ratio that is "
            "held near 1. The objective takes the more cautious of the two, also when the "
            "advantage is negative.",
            "ratio, advantages and mask are [batch gen]. Whiten over the real tokens only. The "
            "mean at the end makes a single number.",
            "torch.minimum(ratio * advantages, ratio.clip(1 - clip_coef, 1 + clip_coef) * "
            "advantages), then masked_mean(..., mask, denominator=denominator).",
        ),
        cases=_surrogate_cases,
        gradients=("logprobs",),
        slips=(
            Slip(
                "this takes the larger product: it is the smaller one",
                {"torch.minimum": "torch.maximum"},
            ),
            Slip(
                "only the clipped ratio is used: compare it with the unclipped one",
                {SMALLER_PRODUCT: "clipped_ratio * advantages"},
            ),
            Slip(
                "this takes the smaller ratio: multiply first, and take the smaller product, for a "
                "negative advantage turns the order round",
                {SMALLER_PRODUCT: "torch.minimum(ratio, clipped_ratio) * advantages"},
            ),
            Slip(
                TOO_EARLY,
                {
                    "masked_mean(surrogate, mask, denominator=denominator)": ""
                    "masked_mean(surrogate, mask, dim=-1).mean()"
                },
            ),
            Slip(
                "the ratio is never clipped",
                {SMALLER_PRODUCT: "ratio * advantages"},
            ),
            Slip(
                "the ratio is clipped around 0, and should be around 1",
                {"ratio.clip(1 - clip_coef, 1 + clip_coef)": "ratio.clip(-clip_coef, clip_coef)"},
            ),
            Slip("the advantages are not whitened", {"if normalize:": "if False:"}),
            Slip(
                "the advantages are whitened even when not asked for", {"if normalize:": "if True:"}
            ),
            Slip(
                "the advantages are whitened over padding, too",
                {"whiten(advantages, mask, eps=eps)": "whiten(advantages, eps=eps)"},
            ),
            Slip(DIVIDES_BY_ALL, {"masked_mean(surrogate, mask,": "masked_mean(surrogate, None,"}),
            Slip(
                DIVIDES_BY_ALL,
                {"masked_mean(surrogate, mask,": "masked_mean(surrogate, None,"}
                | LOGPROBS_AS_GIVEN,
            ),
            Slip(
                PADDING_COUNTS,
                {
                    "masked_mean(surrogate, mask,": "masked_mean(surrogate, None,",
                    "whiten(advantages, mask, eps=eps)": "whiten(advantages, eps=eps)",
                }
                | LOGPROBS_AS_GIVEN,
            ),
            Slip(DENOMINATOR_UNUSED, {", denominator=denominator)": ")"}),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=calc_value_function_loss,
        difficulty=2,
        minutes=15,
        hints=(
            "Half the squared error, averaged over the real tokens. With a clip, the error cannot "
            "be made small by moving further from the old value than the clip allows.",
            "values, returns, old_values and mask are [batch gen]. Clip the change of the value, "
            "not the value: old_values + (values - old_values).clamp(-clip, clip).",
            "torch.maximum of (values - returns).square() and (clipped - returns).square(); then "
            "0.5 * vf_coef * masked_mean(..., mask, denominator=denominator).",
        ),
        cases=_value_loss_cases,
        gradients=("values",),
        slips=(
            Slip("the half is missing", {"return 0.5 * vf_coef": "return vf_coef"}),
            Slip(COEF_MISSING, {"0.5 * vf_coef * masked_mean": "0.5 * masked_mean"}),
            Slip(
                "the coefficient is missing, and so is the half",
                {"0.5 * vf_coef * masked_mean": "masked_mean"},
            ),
            Slip(
                "this is the absolute error: square it",
                {"= (values - returns).square()": "= (values - returns).abs()"},
            ),
            Slip(
                DIVIDES_BY_ALL,
                {"masked_mean(squared_error, mask,": "masked_mean(squared_error, None,"},
            ),
            Slip(
                PADDING_COUNTS,
                {"masked_mean(squared_error, mask,": "masked_mean(squared_error, None,"}
                | VALUES_AS_GIVEN,
            ),
            Slip(DENOMINATOR_UNUSED, {", denominator=denominator)": ")"}),
            Slip("the clip is not used", {"if clip is not None:": "if False:"}),
            Slip(
                "only the clipped error is used: take the larger one of the two",
                {
                    "torch.maximum(squared_error, (clipped - returns).square())": ""
                    "(clipped - returns).square()"
                },
            ),
            Slip(
                "the old value is missing: add it to the change that was clipped",
                {"= old_values + (values - old_values).clamp(": "= (values - old_values).clamp("},
            ),
            Slip(
                "of the two errors this takes the smaller one: it is the larger one",
                {"torch.maximum": "torch.minimum"},
            ),
            Slip(
                "the value itself is clipped: clip its distance from the old value",
                {"= old_values + (values - old_values).clamp(": "= values.clamp("},
            ),
            Slip(
                NOT_BLANKED,
                VALUES_AS_GIVEN,
            ),
            Slip(
                HALF + ", before anything is squared",
                {
                    "at_least_float32(values)": "values",
                    "at_least_float32(returns)": "returns",
                    "at_least_float32(old_values)": "old_values",
                },
            ),
        ),
    ),
)
