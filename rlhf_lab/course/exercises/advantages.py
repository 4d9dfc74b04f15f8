"""Exercises of lesson 06 on credit: one-step advantages, GAE, returns."""

import torch

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.functional import compute_advantages, compute_gae, compute_returns

LESSON = "06_ppo"
MULTIPLIED = "this multiplies by the mask, and 0 * nan is nan: put 0 there instead"
MASK_UNUSED = "the mask is not used: step over masked tokens, and put 0 there"
ONE_STEP = "reward + gamma * next_value - value"
NOT_LAST_REAL = (
    "what comes after a response is read from the padding: step over masked tokens, so that the "
    "last real token sees what lies behind the response"
)


def _one_step_cases() -> tuple[Case, ...]:
    cases = standard_cases(
        compute_advantages, large={"values": 1e6, "rewards": 1e6}, spoil=("values",)
    )
    sizes = {"batch": 3, "gen": 4}
    arguments = draw(compute_advantages, sizes, 8, {"gamma": 0.9}, optional=("mask",))
    paid = torch.randn(3, 4, generator=torch.Generator().manual_seed(9))
    return (*cases, Case("a reward for each token, discounted", arguments | {"rewards": paid}))


def _gae_cases() -> tuple[Case, ...]:
    large = {"values": 1e6, "token_rewards": 1e6}
    spoil = ("values", "token_rewards")
    cases = standard_cases(compute_gae, large=large, spoil=spoil, gamma=0.9, lam=0.8)
    undiscounted = draw(compute_gae, {"batch": 3, "gen": 4}, 11)
    return (*cases, Case("gamma and lam as by default", undiscounted))


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=compute_advantages,
        difficulty=2,
        minutes=15,
        hints=(
            "The advantage of a token is how much better the next state is than this one. Behind "
            "the last token stands the reward itself.",
            "values is [batch gen], rewards [batch] or [batch gen], the result [batch gen]. A "
            "masked token keeps the next value as it is.",
            "Going backwards: advantage = torch.where(real, reward + gamma * next_value - value, "
            "0.0), then next_value = torch.where(real, value, next_value); stack the list the "
            "right way round.",
        ),
        cases=_one_step_cases,
        slips=(
            Slip(
                "this is the reward minus the value at every token, not one step ahead",
                {ONE_STEP: "paid.sum(1) - value"},
            ),
            Slip("the value of the next state is missing", {ONE_STEP: "reward - value"}),
            Slip(
                "the next value is not discounted with gamma",
                {"gamma * next_value -": "next_value -"},
            ),
            Slip(
                "masked tokens have an advantage: put 0 there",
                {f"{ONE_STEP}, 0.0": f"{ONE_STEP}, paid.sum(1) - value"},
            ),
            Slip(
                "masked tokens have an advantage: put 0 there",
                {f"torch.where(real, {ONE_STEP}, 0.0)": ONE_STEP},
            ),
            Slip(
                NOT_LAST_REAL,
                {"next_value = torch.where(real, value, next_value)": "next_value = value"},
            ),
            Slip(
                NOT_LAST_REAL,
                {
                    "torch.zeros_like(values[:, 0])": "paid.sum(1)",
                    ONE_STEP: "next_value - value",
                    "next_value = torch.where(real, value, next_value)": "next_value = value",
                },
            ),
            Slip(
                MULTIPLIED,
                {f"torch.where(real, {ONE_STEP}, 0.0)": f"({ONE_STEP}) * real"},
            ),
            Slip("the advantages stand in backward order", {"advantages[::-1]": "advantages"}),
            Slip(
                "the sign is the other way round: next value minus this one",
                {ONE_STEP: "value - gamma * next_value - reward"},
            ),
            Slip(MASK_UNUSED, {" if mask is None else mask": ""}),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=compute_gae,
        difficulty=4,
        minutes=25,
        hints=(
            "Every advantage is the one-step error here, plus a discounted part of the next "
            "advantage. So begin at the end.",
            "At each t, delta, value and advantage are [batch]. Keep two of them for the step "
            "before: next_value and next_advantage, unchanged where the mask is False.",
            "delta = token_rewards[:, t] + gamma * next_value - values[:, t]; advantage = delta + "
            "gamma * lam * next_advantage.",
        ),
        cases=_gae_cases,
        slips=(
            Slip("lam is not used", {"gamma * lam * next_advantage": "gamma * next_advantage"}),
            Slip(
                "the next advantage is not discounted with gamma",
                {"gamma * lam * next_advantage": "lam * next_advantage"},
            ),
            Slip(
                "the next value is not discounted with gamma",
                {"gamma * next_value -": "next_value -"},
            ),
            Slip("the value of this state is not subtracted", {" - values[:, t]": ""}),
            Slip(
                "the last state's own value stands in for what comes behind the response, which is "
                "0",
                {
                    "next_value = next_advantage = torch.zeros_like(values[:, 0])": "next_value, "
                    "next_advantage = values[:, -1], torch.zeros_like(values[:, 0])"
                },
            ),
            Slip(
                NOT_LAST_REAL,
                {
                    "torch.where(mask[:, t], values[:, t], next_value)": "values[:, t]",
                    "torch.where(mask[:, t], advantage, next_advantage)": "advantage",
                },
            ),
            Slip(
                "masked tokens have an advantage: put 0 there",
                {"torch.where(mask[:, t], advantage, 0.0)": "advantage"},
            ),
            Slip(
                MULTIPLIED,
                {"torch.where(mask[:, t], advantage, 0.0)": "advantage * mask[:, t]"},
            ),
            Slip(
                "this walks forward in time: advantages are built from the end",
                {
                    "reversed(range(values.shape[1]))": "range(values.shape[1])",
                    "advantages[::-1]": "advantages",
                },
            ),
            Slip(MASK_UNUSED, {" if mask is None else mask": ""}),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=compute_returns,
        difficulty=1,
        minutes=5,
        hints=(
            "An advantage is how much better things went than the value said. So how well did "
            "they go?",
            "All three are [batch gen]; put 0 where the mask is False.",
            "zero_masked(advantages + values, mask)",
        ),
        cases=lambda: standard_cases(
            compute_returns,
            large={"advantages": 1e6, "values": 1e6},
            spoil=("advantages", "values"),
        ),
        slips=(
            Slip(
                "this subtracts the value: a return is advantage plus value",
                {"+ at_least_float32(values)": "- at_least_float32(values)"},
            ),
            Slip(
                "the advantages are whitened: the returns need them as they are",
                {
                    "at_least_float32(advantages) +": "(advantages - advantages.mean()) / "
                    "(advantages.std() + 1e-8) +"
                },
            ),
            Slip("the mask is not used: put 0 where it is False", {", mask)": ", None)"}),
            Slip(
                MULTIPLIED,
                {
                    "return zero_masked(": "return (1.0 if mask is None else mask) * (",
                    ", mask)": ")",
                },
            ),
        ),
    ),
)
