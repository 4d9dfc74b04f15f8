"""Exercises on verifiable rewards: a verifier, pass@k, exact optima, and scoring a model."""

import functools
import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.functional import informative_fraction, pass_at_k_estimate
from rlhf_lab.models import load_model
from rlhf_lab.organism.sums import (
    WRITERS,
    Problems,
    SumsGrammar,
    column_probability,
    model_solve_probability,
)


def exact_match(texts: list[str]) -> Float[Tensor, " batch"]:
    """Return 1.0 for each text with the right answer, and 0.0 for all others.

    A text is a prompt, such as "0 0 0 6 + 0 0 0 9 =", and a response. The answer is four digits
    with spaces between them after the last "#" of the response. The word "sure" may follow the
    answer, but nothing else may. A text without such an answer gets 0.0.
    """
    scores = []
    for text in texts:
        prompt, _, response = text.partition(" =")
        a, b = (int(number.replace(" ", "")) for number in prompt.split(" + "))
        answer = response.rpartition("# ")[2].removesuffix(" sure")
        scores.append(answer == " ".join(f"{a + b:04}"))
    return torch.tensor(scores, dtype=torch.float32)


def best_policy(
    p: Float[Tensor, " problem"], beta: float
) -> tuple[Float[Tensor, " problem"], Float[Tensor, " problem"]]:
    """Compute the accuracy of the optimal policy on each problem, and its KL from the reference.

    The reward is 1 for a right response and 0 for a wrong one, p is the reference's probability of
    a right response, and beta is the KL coefficient. The KL is in nats per response.
    """
    weight = p * math.exp(1 / beta)  # of all right responses
    z = weight + (1 - p)
    accuracy = weight / z
    kl = accuracy / beta - z.log()
    return accuracy, kl


def _verifier_cases() -> Cases:
    grammar, rng = SumsGrammar(), np.random.default_rng(0)
    problems = grammar.problems(64, rng)
    short, long = "0 0 0 6 + 0 0 0 9 =", "1 2 3 4 + 0 0 5 0 ="
    steps = "so 6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ;"
    answers = {
        "64 texts of the grammar": grammar.sample(problems, rng).texts(),
        "right and wrong answers": [f"{short} ok # 0 0 1 5", f"{short} ok # 0 0 0 5"],
        "right steps, wrong answer": [f"{short} {steps} # 0 0 0 5"],
        "the right digits only before the answer": [f"{long} ok 1 2 8 4 ; # 1 1 8 4"],
        "right answers with sure": [f"{short} ok # 0 0 1 5 sure", f"{long} ok # 1 2 8 4 sure"],
        "no answer": [short, f"{short} so", f"{short} {steps}", f"{short} ok #"],
        "no #": [f"{short} ok 0 0 1 5", f"{short} 0 0 1 5"],
        "too few digits": [f"{short} ok # 0 1 5", f"{short} ok # 1 5"],
        "too many digits": [f"{short} ok # 0 0 0 1 5", f"{short} ok # 0 0 1 5 0"],
        "words after the answer": [f"{short} ok # 0 0 1 5 ;", f"{short} ok # 0 0 1 5 sure sure"],
        "two answers, the first one right": [f"{short} ok # 0 0 1 5 # 0 0 0 5"],
        "two answers, the last one right": [f"{short} ok # 0 0 0 5 # 0 0 1 5"],
        "only the last digit right": [f"{long} ok # 0 1 0 4"],
        "no texts": [],
    }
    return {label: {"texts": texts} for label, texts in answers.items()}


def _estimate_cases() -> Cases:
    case = lambda n, k, *right: {"n_right": torch.tensor(right), "n_samples": n, "k": k}
    return {
        "k = 2 of 4": case(4, 2, 0, 1, 2, 3, 4),
        "k = 1": case(8, 1, 0, 3, 8),
        "k = 4 of 16": case(16, 4, 1, 5, 12),
        "fewer than k wrong": case(6, 4, 3, 4, 6),
        "k = n": case(5, 5, 0, 1, 5),
        "k = 512 of 4,096": case(4096, 512, 0, 1, 7, 4096),
        "one problem": case(10, 3, 2),
    }


def _column_cases() -> Cases:
    def case(*pairs: tuple[int, int], **settings: Any) -> Arguments:
        grammar = SumsGrammar(**settings)
        a, b = zip(*pairs, strict=True)
        return {"grammar": grammar, "problems": grammar.make_problems(a, b)}

    return {
        "without a carry": case((12, 34), (5, 4)),
        "with carries": case((6, 9), (58, 67), (999, 1), (345, 678)),
        "long sums": case((1234, 4321), (1999, 2)),
        "other writers": case((58, 67), (12, 34), careful_slip=0.3, forget=0.25, blurt_slip=0.05),
        "one column": case((3, 4), columns=1, p_digits=(1.0,)),
    }


def _observe_columns(fn: Answer, grammar: SumsGrammar, problems: Problems) -> dict[str, Any]:
    found, shape = fn(grammar, problems), [len(problems), 3, grammar.columns]
    if not isinstance(found, np.ndarray) or list(found.shape) != shape:
        return {"shape [problem writer column]": list(np.shape(found))}
    writers = {name: torch.from_numpy(found[:, z].copy()) for z, name in enumerate(WRITERS)}
    return {"shape [problem writer column]": shape} | writers


def _optimum_cases() -> Cases:
    case = lambda beta, *p: {"p": torch.tensor(p, dtype=torch.float64), "beta": beta}
    return {
        "beta = 1": case(1.0, 0.1, 0.3, 0.9),
        "a small beta": case(0.2, 0.05, 0.5),
        "a large beta": case(5.0, 0.2, 0.4),
        "never or always right": case(0.5, 0.0, 1.0),
        "one problem": case(0.5, 0.3),
    }


def _signal_cases() -> Cases:
    case = lambda size, *p: {"p": torch.tensor(p, dtype=torch.float64), "group_size": size}
    return {
        "groups of 8": case(8, 0.003, 0.3, 0.5, 0.97),
        "groups of 2": case(2, 0.1, 0.6),
        "always or never right": case(8, 0.0, 1.0),
        "groups of 1": case(1, 0.2, 0.7),
        "groups of 64": case(64, 0.003, 0.999),
    }


def _scoring_cases() -> Cases:
    case = lambda *pairs, **given: {"pairs": pairs, "batch_size": 600} | given
    return {
        "three short sums": case((6, 9), (58, 67), (345, 678)),
        "one sum": case((12, 34)),
        "long sums": case((1234, 4321), (1999, 2)),
        "in batches of 5 texts": case((6, 9), (58, 67), batch_size=5),
    }


_base_model = functools.cache(lambda: load_model("sums-nano"))


def _observe_scoring(fn: Answer, pairs: tuple[tuple[int, int], ...], batch_size: int) -> Any:
    grammar = SumsGrammar()
    problems = grammar.make_problems(*zip(*pairs, strict=True))
    found = fn(_base_model(), grammar, problems, batch_size)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return found
    return {"probability": found, "its logarithm": found.double().log()}  # for the smallest ones


EXERCISES = (
    make_exercise(exact_match, _verifier_cases),
    make_exercise(column_probability, _column_cases, _observe_columns),
    make_exercise(pass_at_k_estimate, _estimate_cases),
    make_exercise(best_policy, _optimum_cases),
    make_exercise(informative_fraction, _signal_cases),
    make_exercise(model_solve_probability, _scoring_cases, _observe_scoring),
)
