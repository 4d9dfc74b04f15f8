"""Exercises on verifiable rewards: a verifier, pass@k, exact optima, and scoring a model."""

import functools
import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course.cases import Cases
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.models import load_model
from rlhf_lab.organism.sums import (
    WRITERS,
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


@exercise(exact_match)
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


def _observe_columns(fn: Answer, pairs: list[list[int]], **settings: Any) -> dict[str, Any]:
    tuples = {name: tuple(x) for name, x in settings.items() if isinstance(x, list)}  # of TOML
    grammar = SumsGrammar(**settings | tuples)
    found = fn(grammar, grammar.make_problems(*zip(*pairs, strict=True)))
    shape = [len(pairs), 3, grammar.columns]
    if not isinstance(found, np.ndarray) or list(found.shape) != shape:
        return {"shape [problem writer column]": list(np.shape(found))}
    writers = {name: torch.from_numpy(found[:, z].copy()) for z, name in enumerate(WRITERS)}
    return {"shape [problem writer column]": shape} | writers


_columns = make_exercise(column_probability, observe=_observe_columns)
_optimum = make_exercise(best_policy)

_base_model = functools.cache(lambda: load_model("sums-nano"))


def _observe_scoring(fn: Answer, pairs: list[list[int]], batch_size: int) -> Any:
    grammar = SumsGrammar()
    problems = grammar.make_problems(*zip(*pairs, strict=True))
    found = fn(_base_model(), grammar, problems, batch_size)
    return {"probability": found, "its logarithm": found.double().log()}  # for the smallest ones


_scoring = make_exercise(model_solve_probability, observe=_observe_scoring)
