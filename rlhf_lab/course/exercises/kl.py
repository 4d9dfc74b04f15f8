"""Lesson 05, the objective: KL divergence, the KL penalty, and estimates of it."""

from rlhf_lab.course.cases import half_precision, standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.objective import (
    COEF_MISSING,
    DENOMINATOR_UNUSED,
    DIVIDES_BY_ALL,
    HALF,
    LESSON,
    LOG_OF_SOFTMAX,
    NEVER_SAID,
    NOT_BLANKED,
    ONLY_AFTER,
    PADDING_COUNTS,
    TOO_EARLY,
    filtered,
)
from rlhf_lab.functional import (
    calc_kl_penalty,
    kl_estimate,
    kl_per_token,
)


def _estimate_cases() -> tuple[Case, ...]:
    cases = []
    for kind in ("k1", "k2", "k3"):
        cases.extend(standard_cases(kl_estimate, large={"logprobs": 10.0}, kind=kind))
    return (*cases, half_precision(kl_estimate, "logprobs", "ref_logprobs", kind="k1"))


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=kl_per_token,
        difficulty=2,
        minutes=15,
        hints=(
            "KL(policy || reference) is the average of log pi - log pi_ref, over words drawn from "
            "the policy: so each word counts with the policy's probability.",
            "Both logits are [batch gen d_vocab] and the result is [batch gen]. A word with "
            "probability 0 adds 0, but 0 * inf is nan: put 0 there before multiplying.",
            "logprobs.exp() * (logprobs - ref_logprobs), summed over dim=-1, with both "
            "log-probabilities set to 0 by zero_masked(..., logprobs.exp() > 0).",
        ),
        cases=lambda: (
            *standard_cases(kl_per_token, large={"logits": 1e3, "ref_logits": 1e3}),
            filtered(kl_per_token, "logits"),
            filtered(kl_per_token, "logits", "ref_logits"),
            half_precision(kl_per_token, "logits", "ref_logits"),
        ),
        gradients=("logits",),
        slips=(
            Slip(
                "this is KL(reference || policy): the two are the other way round",
                {
                    "zero_masked(logprobs.exp() * (logprobs - ref_logprobs), possible)": ""
                    "(ref_logprobs.exp() * (ref_logprobs - logprobs))"
                },
            ),
            Slip(
                "this averages over the vocabulary, and should sum",
                {"possible).sum(dim=-1)": "possible).mean(dim=-1)"},
            ),
            Slip(
                "each word counts the same here; weight it with the policy's probability",
                {"logprobs.exp() * (logprobs - ref": "(logprobs - ref"},
            ),
            Slip(
                "these are differences of logits: take the log-softmax first",
                {
                    "(logits).log_softmax(dim=-1)": "(logits)",
                    "(ref_logits).log_softmax(dim=-1)": "(ref_logits)",
                    "logprobs.exp() > 0": "logits.softmax(-1) > 0",
                    "zero_masked(logprobs.exp() * (": "zero_masked(logits.softmax(-1) * (",
                },
            ),
            Slip(
                NEVER_SAID,
                {
                    "logprobs, ref_logprobs = zero_masked(logprobs, possible), "
                    "zero_masked(ref_logprobs, possible)": "",
                    "zero_masked(logprobs.exp() * (logprobs - ref_logprobs), possible)": ""
                    "(logprobs.exp() * (logprobs - ref_logprobs))",
                },
            ),
            Slip(
                ONLY_AFTER,
                {
                    "logprobs, ref_logprobs = zero_masked(logprobs, possible), "
                    "zero_masked(ref_logprobs, possible)": ""
                },
            ),
            Slip(
                "the gradient of kl_div is nan where a probability is 0, as it holds the logarithm "
                "of that: compute it from log-probabilities, with 0 for those",
                {
                    "logprobs, ref_logprobs = zero_masked(logprobs, possible), "
                    "zero_masked(ref_logprobs, possible)": "",
                    "zero_masked(logprobs.exp() * (logprobs - ref_logprobs), possible)": ""
                    "torch.nn.functional.kl_div(ref_logprobs, at_least_float32(logits).softmax(-1),"
                    ' reduction="none")',
                },
            ),
            Slip(
                "a reference probability that is rounded to 0 makes this inf: its logarithm is "
                "still finite, so compute it from log-probabilities",
                {
                    "zero_masked(logprobs.exp() * (logprobs - ref_logprobs), possible).sum(dim=-1)"
                    "": "torch.distributions.kl_divergence(*(torch.distributions.Categorical("
                    "logits=at_least_float32(x)) for x in (logits, ref_logits)))",
                },
            ),
            Slip(
                HALF,
                {
                    "at_least_float32(logits)": "logits",
                    "at_least_float32(ref_logits)": "ref_logits",
                },
            ),
            Slip(
                LOG_OF_SOFTMAX,
                {
                    "(logits).log_softmax(dim=-1)": "(logits).softmax(dim=-1).log()",
                    "(ref_logits).log_softmax(dim=-1)": "(ref_logits).softmax(dim=-1).log()",
                    "logprobs, ref_logprobs = zero_masked(logprobs, possible), "
                    "zero_masked(ref_logprobs, possible)": "",
                    "zero_masked(logprobs.exp() * (logprobs - ref_logprobs), possible)": ""
                    "(logprobs.exp() * (logprobs - ref_logprobs))",
                },
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=calc_kl_penalty,
        difficulty=2,
        minutes=10,
        hints=(
            "You have the KL of each token. What is left is the mean over the tokens that count, "
            "and the coefficient.",
            "kl_per_token gives [batch gen], the shape of the mask; masked_mean makes a single "
            "number of it.",
            "kl = kl_per_token(zero_masked(logits, mask), zero_masked(ref_logits, mask)), then "
            "kl_coef * masked_mean(kl, mask, denominator=denominator).",
        ),
        cases=lambda: standard_cases(
            calc_kl_penalty,
            large={"logits": 1e3, "ref_logits": 1e3},
            spoil=("logits", "ref_logits"),
            kl_coef=0.7,
        ),
        gradients=("logits",),
        slips=(
            Slip(COEF_MISSING, {"kl_coef * masked_mean": "masked_mean"}),
            Slip(DIVIDES_BY_ALL, {"masked_mean(kl, mask,": "masked_mean(kl, None,"}),
            Slip(
                PADDING_COUNTS,
                {
                    "masked_mean(kl, mask,": "masked_mean(kl, None,",
                    "zero_masked(logits, mask)": "logits",
                    "zero_masked(ref_logits, mask)": "ref_logits",
                },
            ),
            Slip(
                "this is KL(reference || policy): the two are the other way round",
                {
                    "kl_per_token(zero_masked(logits, mask), zero_masked(ref_logits, mask))": ""
                    "kl_per_token(zero_masked(ref_logits, mask), zero_masked(logits, mask))"
                },
            ),
            Slip(DENOMINATOR_UNUSED, {", denominator=denominator)": ")"}),
            Slip(
                TOO_EARLY,
                {
                    "masked_mean(kl, mask, denominator=denominator)": ""
                    "masked_mean(masked_mean(kl, mask, dim=-1))"
                },
            ),
            Slip(
                NOT_BLANKED,
                {
                    "kl_per_token(zero_masked(logits, mask), zero_masked(ref_logits, mask))": ""
                    "kl_per_token(logits, ref_logits)"
                },
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=kl_estimate,
        difficulty=2,
        minutes=10,
        hints=(
            "All three are functions of one number per token: how much likelier the policy holds "
            "the sampled token than the reference does.",
            "Everything is [batch gen], with d = 0 at masked tokens. In terms of d: k1 is d, k2 is "
            "half its square, and k3 is exp(-d) - 1 + d.",
            'd = logprobs - ref_logprobs; "k1": d, "k2": d.square() / 2, "k3": '
            "torch.expm1(-d) + d (expm1 is exp minus 1, exact near 0).",
        ),
        cases=_estimate_cases,
        gradients=("logprobs",),
        slips=(
            Slip(
                "the two are the other way round: d is log pi - log pi_ref",
                {
                    "at_least_float32(logprobs) - at_least_float32(ref_logprobs)": ""
                    "at_least_float32(ref_logprobs) - at_least_float32(logprobs)"
                },
            ),
            Slip("k2 is half the square: the half is missing", {"square() / 2": "square()"}),
            Slip(
                "in k3 the sign of d is the other way round",
                {"expm1(-log_ratio) + log_ratio": "expm1(log_ratio) - log_ratio"},
            ),
            Slip("in k3 the -1 is missing", {"expm1(-log_ratio)": "exp(-log_ratio)"}),
            Slip(
                HALF,
                {
                    "at_least_float32(logprobs)": "logprobs",
                    "at_least_float32(ref_logprobs)": "ref_logprobs",
                },
            ),
            Slip(
                "k1 may be negative: it is d itself, not its absolute value",
                {'"k1":\n        return log_ratio': '"k1":\n        return log_ratio.abs()'},
            ),
            Slip(
                PADDING_COUNTS,
                {
                    "zero_masked(logprobs, mask)": "logprobs",
                    "zero_masked(ref_logprobs, mask)": "ref_logprobs",
                },
            ),
        ),
    ),
)
