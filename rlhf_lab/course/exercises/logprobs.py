"""Lesson 05, the objective: normalized rewards and log-probabilities of the sampled tokens."""

import torch

from rlhf_lab.course.cases import draw, half_precision, standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.objective import HALF, LESSON, LOG_OF_SOFTMAX
from rlhf_lab.functional import (
    get_logprobs,
    normalize_reward,
)

WRONG_AXIS = "the softmax runs over the tokens of the sequence, not over the vocabulary"
OFF_BY_ONE = (
    "off by one: the logits at a position are matched with the token at that position, but they "
    "are about the next one"
)


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
)
