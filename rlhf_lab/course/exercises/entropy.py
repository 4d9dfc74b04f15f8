"""Lesson 05, the objective: entropy and the entropy bonus."""

from rlhf_lab.course.cases import half_precision, standard_cases
from rlhf_lab.course.exercise import Exercise, Slip
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
    calc_entropy_bonus,
    entropy_per_token,
)

GRADIENT_OVERFLOWS = (
    "the value is right, but not the gradient: a word that cannot be said has a logarithm of -inf, "
    "or the lowest number there is, and its gradient is inf or nan: put 0 there before multiplying"
)


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=entropy_per_token,
        difficulty=2,
        minutes=10,
        hints=(
            "Entropy is the average surprise, and the surprise of a word is minus its "
            "log-probability.",
            "logits are [batch gen d_vocab] and the result is [batch gen]: sum over the "
            "vocabulary. Where the probability is 0, put 0 for the log-probability.",
            "logprobs = logits.log_softmax(dim=-1), zero_masked where logprobs.exp() > 0 fails, "
            "then -(logprobs.exp() * logprobs).sum(dim=-1) over the possible words.",
        ),
        cases=lambda: (
            *standard_cases(entropy_per_token, large={"logits": 1e3}),
            filtered(entropy_per_token, "logits"),
            half_precision(entropy_per_token, "logits"),
        ),
        gradients=("logits",),
        slips=(
            Slip(
                "the minus is missing: entropy is positive",
                {"return -zero_masked": "return zero_masked"},
            ),
            Slip(
                "this averages over the vocabulary, and should sum",
                {"possible).sum(dim=-1)": "possible).mean(dim=-1)"},
            ),
            Slip(
                "this is in bits: use the natural logarithm",
                {"possible).sum(dim=-1)": "possible).sum(dim=-1) / 0.6931471805599453"},
            ),
            Slip(
                NEVER_SAID,
                {
                    "logprobs = zero_masked(logprobs, possible)": "",
                    "-zero_masked(logprobs.exp() * logprobs, possible)": ""
                    "-(logprobs.exp() * logprobs)",
                },
            ),
            Slip(ONLY_AFTER, {"logprobs = zero_masked(logprobs, possible)": ""}),
            Slip(
                GRADIENT_OVERFLOWS,
                {
                    "at_least_float32(logits).log_softmax(dim=-1)": "at_least_float32(logits)",
                    "logprobs = zero_masked(logprobs, possible)": "from torch.distributions import "
                    "Categorical",
                    "-zero_masked(logprobs.exp() * logprobs, possible).sum(dim=-1)": ""
                    "Categorical(logits=logprobs).entropy()",
                },
            ),
            Slip(HALF, {"at_least_float32(logits)": "logits"}),
            Slip(
                LOG_OF_SOFTMAX,
                {
                    "(logits).log_softmax(dim=-1)": "(logits).softmax(dim=-1).log()",
                    "logprobs = zero_masked(logprobs, possible)": "",
                    "-zero_masked(logprobs.exp() * logprobs, possible)": ""
                    "-(logprobs.exp() * logprobs)",
                },
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=calc_entropy_bonus,
        difficulty=1,
        minutes=5,
        hints=(
            "It has the form of the KL penalty: a mean over the tokens that count, times a "
            "coefficient.",
            "entropy_per_token gives [batch gen]; the result is a single number.",
            "ent_coef * masked_mean(entropy_per_token(zero_masked(logits, mask)), mask, "
            "denominator=denominator)",
        ),
        cases=lambda: standard_cases(
            calc_entropy_bonus, large={"logits": 1e3}, spoil=("logits",), ent_coef=0.4
        ),
        gradients=("logits",),
        slips=(
            Slip(COEF_MISSING, {"ent_coef * masked_mean": "masked_mean"}),
            Slip(DIVIDES_BY_ALL, {"masked_mean(entropy, mask,": "masked_mean(entropy, None,"}),
            Slip(
                PADDING_COUNTS,
                {
                    "masked_mean(entropy, mask,": "masked_mean(entropy, None,",
                    "zero_masked(logits, mask)": "logits",
                },
            ),
            Slip(DENOMINATOR_UNUSED, {", denominator=denominator)": ")"}),
            Slip(
                TOO_EARLY,
                {
                    "masked_mean(entropy, mask, denominator=denominator)": ""
                    "masked_mean(masked_mean(entropy, mask, dim=-1))"
                },
            ),
            Slip(NOT_BLANKED, {"zero_masked(logits, mask)": "logits"}),
        ),
    ),
)
