"""Lesson 03, rewards and credit: one-step advantages, GAE, returns."""

import torch

from rlhf_lab.course.cases import draw, standard_cases
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import compute_advantages, compute_gae, compute_returns

HOLES = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]]).bool()
"""Tokens of a tool's answer, which the policy did not write, stand between others."""


def _one_step_cases() -> tuple[Case, ...]:
    cases = standard_cases(
        compute_advantages, large={"values": 1e6, "rewards": 1e6}, spoil=("values",)
    )
    sizes = {"batch": 3, "gen": 4}
    arguments = draw(compute_advantages, sizes, 8, {"gamma": 0.9}, optional=("mask",))
    paid = torch.randn(3, 4, generator=torch.Generator().manual_seed(9))
    holes = arguments | {"rewards": paid, "mask": HOLES}
    return (
        *cases,
        Case("a reward for each token, discounted", arguments | {"rewards": paid}),
        Case("holes in the mask", holes),
    )


def _gae_cases() -> tuple[Case, ...]:
    large = {"values": 1e6, "token_rewards": 1e6}
    spoil = ("values", "token_rewards")
    cases = standard_cases(compute_gae, large=large, spoil=spoil, gamma=0.9, lam=0.8)
    undiscounted = draw(compute_gae, {"batch": 3, "gen": 4}, 11)
    holes = draw(compute_gae, {"batch": 3, "gen": 4}, 12, {"gamma": 0.9, "lam": 0.8})
    return (
        *cases,
        Case("gamma and lam as by default", undiscounted),
        Case("holes in the mask", holes | {"mask": HOLES}),
    )


_exercise = exercise_from("advantages.toml")

EXERCISES = (
    _exercise(compute_advantages, cases=_one_step_cases),
    _exercise(compute_gae, cases=_gae_cases),
    _exercise(
        compute_returns,
        cases=lambda: standard_cases(
            compute_returns,
            large={"advantages": 1e6, "values": 1e6},
            spoil=("advantages", "values"),
        ),
    ),
)
