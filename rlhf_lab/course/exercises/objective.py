"""Lesson 05, the objective: every term of it, and what goes into them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import draw, half_precision, standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.functional import (
    calc_clipped_surrogate_objective,
    calc_entropy_bonus,
    calc_kl_penalty,
    calc_value_function_loss,
    entropy_per_token,
    get_logprobs,
    kl_estimate,
    kl_per_token,
    normalize_reward,
    policy_ratio,
    ppo_surrogate,
)
from rlhf_lab.training import AdaptiveKLController

LESSON = "05_the_objective"
COEF_MISSING = "the coefficient is missing"
PADDING_COUNTS = "the mask is not used: padding counts as if it were text"
DIVIDES_BY_ALL = "this divides by all entries, the masked ones included"
DENOMINATOR_UNUSED = "the denominator is not used"
LOG_OF_SOFTMAX = "the logarithm of a softmax is -inf or nan for large logits: use log_softmax"
WRONG_AXIS = "the softmax runs over the tokens of the sequence, not over the vocabulary"
HALF = "half-precision input stays in half precision: at_least_float32 turns it into float32"
NOT_BLANKED = (
    "nan or inf at padding gets into the gradient: put 0 there first, not only in what comes out"
)
NEVER_SAID = (
    "a word that cannot be said gives 0 * inf, which is nan: put 0 there before multiplying"
)
ONLY_AFTER = (
    "0 * inf is nan: putting 0 there after multiplying fixes the value, but not the gradient"
)
GRADIENT_OVERFLOWS = (
    "the value is right, but not the gradient: a word that cannot be said has a logarithm of -inf, "
    "or the lowest number there is, and its gradient is inf or nan: put 0 there before multiplying"
)
OFF_BY_ONE = (
    "off by one: the logits at a position are matched with the token at that position, but they "
    "are about the next one"
)
BLANKED = "_blank(mask, logprobs, old_logprobs, advantages)"
ADVANTAGES_AS_GIVEN = {BLANKED: "(*_blank(mask, logprobs, old_logprobs), advantages)"}
ALL_AS_GIVEN = {BLANKED: "_blank(None, logprobs, old_logprobs, advantages)"}
SMALLER_PRODUCT = "torch.minimum(ratio * advantages, ratio.clip(low, high) * advantages)"
VALUES_AS_GIVEN = {
    "zero_masked(at_least_float32(values), mask)": "at_least_float32(values)",
    "zero_masked(at_least_float32(returns), mask)": "at_least_float32(returns)",
    "zero_masked(at_least_float32(old_values), mask)": "at_least_float32(old_values)",
}
TOO_EARLY = "this averages each sequence first: tokens of short responses count for more"


def _filtered(fn, *names: str) -> Case:
    """A case in which one word of the vocabulary cannot be said, as after top-k."""
    arguments = draw(fn, {"batch": 2, "gen": 3, "d_vocab": 5}, 8)
    cut = {name: arguments[name].index_fill(-1, torch.tensor([1]), -torch.inf) for name in names}
    return Case("one word has logit -inf", arguments | cut)


def _normalize_cases() -> tuple[Case, ...]:
    cases = standard_cases(normalize_reward, large={"reward": 1e6})
    rewards = draw(normalize_reward, {"batch": 4}, 7)
    return (
        *cases,
        Case("large eps", rewards | {"eps": 0.5}),
        Case("equal rewards", {"reward": torch.full((4,), 0.25)}),
        Case("equal rewards whose mean is rounded", {"reward": torch.full((7,), 1000.1)}),
        Case("half precision", {"reward": rewards["reward"].half()}),
    )


def _logprob_cases() -> tuple[Case, ...]:
    cold = standard_cases(
        get_logprobs,
        sizes={"seq": 7},
        one_token={"seq": 4},
        large={"logits": 1e3},
        prefix_len=3,
        temperature=0.7,
    )
    plain = standard_cases(get_logprobs, sizes={"seq": 5}, one_token={"seq": 2})
    return (*cold, *plain, half_precision(get_logprobs, "logits", sizes={"seq": 7}, prefix_len=3))


def _estimate_cases() -> tuple[Case, ...]:
    cases = []
    for kind in ("k1", "k2", "k3"):
        cases.extend(standard_cases(kl_estimate, large={"logprobs": 10.0}, kind=kind))
    return (*cases, half_precision(kl_estimate, "logprobs", "ref_logprobs", kind="k1"))


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
        reference=normalize_reward,
        difficulty=1,
        minutes=5,
        hints=(
            "Measure each reward from the mean, in units of the spread.",
            "reward and the result are [batch]. eps stands outside the root. With one reward "
            "tensor.std() is nan; masked_std gives 0.0 there.",
            "(reward - masked_mean(reward)) / (masked_std(reward) + eps), after "
            "reward = at_least_float32(reward) and reward = reward - reward[:1].",
        ),
        cases=_normalize_cases,
        slips=(
            Slip("the mean is not subtracted", {"(reward - masked_mean(reward))": "reward"}),
            Slip(
                "this divides by the variance, not by its root",
                {"masked_std(reward)": "masked_std(reward) ** 2"},
            ),
            Slip(
                "the standard deviation divides by n here, and should by n - 1",
                {"masked_std(reward)": "reward.std(unbiased=False)"},
            ),
            Slip(
                "a batch of one reward gives nan: its standard deviation is 0 / 0",
                {"masked_std(reward)": "reward.std()"},
            ),
            Slip(
                "eps stands inside the root, and should be added outside",
                {"(masked_std(reward) + eps)": "(masked_std(reward) ** 2 + eps).sqrt()"},
            ),
            Slip(
                "half-precision rewards stay in half precision",
                {"reward = at_least_float32(reward)": ""},
            ),
            Slip(
                "the mean of equal rewards is rounded, and dividing makes the remainder large: "
                "measure from the first reward",
                {"reward = reward - reward[:1]": ""},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=get_logprobs,
        difficulty=2,
        minutes=15,
        hints=(
            "The logits at position s are about the token at s + 1. Which position's logits chose "
            "the first generated token?",
            "From start = prefix_len - 1 on, logits are [batch gen+1 d_vocab] and tokens [batch "
            "gen+1]; eindex with 's+1' drops the last position by itself. Without a prefix_len, "
            "start is 0.",
            "(logits[:, start:] / temperature).log_softmax(dim=-1), then eindex(logprobs, "
            'tokens[:, start:], "b s [b s+1]").',
        ),
        cases=_logprob_cases,
        gradients=("logits",),
        slips=(
            Slip(
                OFF_BY_ONE,
                {
                    'eindex(logprobs, tokens, "b s [b s+1]")': "eindex(logprobs[:, :-1], "
                    'tokens[:, :-1], "b s [b s]")'
                },
            ),
            Slip(
                OFF_BY_ONE,
                {
                    'eindex(logprobs, tokens, "b s [b s+1]")': "eindex(logprobs, tokens, "
                    '"b s [b s]")[:, 1:]'
                },
            ),
            Slip(
                "the first generated token is missing: its logits stand at prefix_len - 1",
                {
                    "logits[:, start:], tokens[:, start:]": "logits[:, prefix_len or 1 :], "
                    "tokens[:, prefix_len or 1 :]"
                },
            ),
            Slip("the temperature is not used", {"(logits) / temperature)": "(logits))"}),
            Slip(
                "this divides by the temperature after the softmax, and should before",
                {
                    "(at_least_float32(logits) / temperature).log_softmax(dim=-1)": ""
                    "at_least_float32(logits).log_softmax(dim=-1) / temperature"
                },
            ),
            Slip(
                "these are probabilities, not their logarithms",
                {".log_softmax(dim=-1)": ".softmax(dim=-1)"},
            ),
            Slip(LOG_OF_SOFTMAX, {".log_softmax(dim=-1)": ".softmax(dim=-1).log()"}),
            Slip(
                LOG_OF_SOFTMAX,
                {
                    "logits, tokens = logits[:, start:], tokens[:, start:]": "tokens = "
                    "tokens[:, start:]",
                    ".log_softmax(dim=-1)": ".softmax(dim=-1).log()[:, start:]",
                },
            ),
            Slip(
                LOG_OF_SOFTMAX,
                {
                    ".log_softmax(dim=-1)": ".softmax(dim=-1)",
                    'eindex(logprobs, tokens, "b s [b s+1]")': 'eindex(logprobs, tokens, "b s '
                    '[b s+1]").log()',
                },
            ),
            Slip(HALF, {"at_least_float32(logits)": "logits"}),
            Slip(WRONG_AXIS, {".log_softmax(dim=-1)": ".log_softmax(dim=1)"}),
        ),
    ),
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
            _filtered(kl_per_token, "logits"),
            _filtered(kl_per_token, "logits", "ref_logits"),
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
            _filtered(entropy_per_token, "logits"),
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
        parts=(ppo_surrogate,),
        slips=(
            Slip(
                "this takes the larger product: it is the smaller one",
                {"torch.minimum": "torch.maximum"},
            ),
            Slip(
                "only the clipped ratio is used: compare it with the unclipped one",
                {SMALLER_PRODUCT: "ratio.clip(low, high) * advantages"},
            ),
            Slip(
                "this takes the smaller ratio: multiply first, and take the smaller product, for a "
                "negative advantage turns the order round",
                {SMALLER_PRODUCT: "torch.minimum(ratio, ratio.clip(low, high)) * advantages"},
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
                {"ratio.clip(low, high)": "ratio.clip(-clip_coef, clip_coef)"},
            ),
            Slip("the advantages are not whitened", {"if normalize:": "if False:"}),
            Slip(
                "the advantages are whitened even when not asked for", {"if normalize:": "if True:"}
            ),
            Slip(
                "the advantages are whitened over padding, too",
                {"whiten(advantages, mask, eps=eps)": "whiten(advantages, eps=eps)"},
            ),
            Slip(
                DIVIDES_BY_ALL,
                {"masked_mean(surrogate, mask,": "masked_mean(surrogate, None,"}
                | ADVANTAGES_AS_GIVEN,
            ),
            Slip(
                DIVIDES_BY_ALL,
                {"masked_mean(surrogate, mask,": "masked_mean(surrogate, None,"} | ALL_AS_GIVEN,
            ),
            Slip(
                PADDING_COUNTS,
                {
                    "masked_mean(surrogate, mask,": "masked_mean(surrogate, None,",
                    "whiten(advantages, mask, eps=eps)": "whiten(advantages, eps=eps)",
                }
                | ALL_AS_GIVEN,
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
