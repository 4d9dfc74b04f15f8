"""Lesson 04, the leash: KL divergence, the KL penalty, and estimates of it."""

from rlhf_lab.course.cases import filtered, half_precision, standard_cases, with_log_probs
from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.functional import calc_kl_penalty, kl_estimate, kl_per_token


def _estimate_cases() -> tuple[Case, ...]:
    cases = []
    for kind in ("k1", "k2", "k3"):
        spoil = ("logprobs", "ref_logprobs")
        cases.extend(standard_cases(kl_estimate, large={"logprobs": 10.0}, spoil=spoil, kind=kind))
    return (*cases, half_precision(kl_estimate, "logprobs", "ref_logprobs", kind="k1"))


_exercise = exercise_from("kl.toml")

EXERCISES = (
    _exercise(
        kl_per_token,
        cases=lambda: with_log_probs(
            (
                *standard_cases(kl_per_token, large={"logprobs": 1e3, "ref_logprobs": 1e3}),
                filtered(kl_per_token, "logprobs"),
                filtered(kl_per_token, "logprobs", "ref_logprobs"),
                filtered(kl_per_token, "ref_logprobs"),
            )
        ),
    ),
    _exercise(
        calc_kl_penalty,
        cases=lambda: standard_cases(
            calc_kl_penalty, large={"kl": 1e3}, spoil=("kl",), kl_coef=0.7
        ),
    ),
    _exercise(kl_estimate, cases=_estimate_cases),
)
