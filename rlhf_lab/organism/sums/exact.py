"""Exact quantities of sums: P(right), outcomes, and KL-regularized optima."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from rlhf_lab.functional.tilting import tilt
from rlhf_lab.organism.optimum import exact_kl
from rlhf_lab.organism.sums.grammar import SumsGrammar
from rlhf_lab.organism.sums.problems import WRITERS, Problems


def column_probability(
    grammar: SumsGrammar, problems: Problems
) -> Float[np.ndarray, "problem writer column"]:
    """Compute the probability that a writer's one choice in a column is the true one.

    The choice is careful's sum digit, hasty's carry, and blurt's answer digit. An answer is right
    if and only if all choices are true: an error in one column cannot make up for one in another.

    careful: 1 - careful_slip.  hasty: 1 - forget if a carry comes in, else 1.
    blurt: 0 if a carry comes in, else 1 - blurt_slip.
    """
    carry = problems.carry_in == 1
    careful = np.full(carry.shape, 1 - grammar.careful_slip)
    hasty = np.where(carry, 1 - grammar.forget, 1.0)
    blurt = np.where(carry, 0.0, 1 - grammar.blurt_slip)
    return np.stack([careful, hasty, blurt], axis=1)


def writer_solve_probability(
    grammar: SumsGrammar, problems: Problems
) -> Float[np.ndarray, "problem writer"]:
    """Compute P(right | writer, problem)."""
    return column_probability(grammar, problems).prod(-1)


def solve_probability(grammar: SumsGrammar, problems: Problems) -> Float[np.ndarray, " problem"]:
    """Compute p(x) = P(right | problem), the grammar's pass@1 on each problem.

    p(x) = sum_z w_z(x) P(right | z, x)
    """
    by_writer = writer_solve_probability(grammar, problems)
    return (grammar.writer_probs(problems) * by_writer).sum(1)


def carry_patterns(
    grammar: SumsGrammar, digits: int
) -> tuple[Problems, Float[np.ndarray, " problem"]]:
    """Return one sum of `digits` digits per pattern of carries, with the pattern's probability.

    All quantities of this file depend on a sum only through its carries and its number of digits,
    so their mean over the patterns is the exact mean over all sums. Go through the columns, units
    first, and count the pairs of digits that continue each pattern.

    Raises ValueError for a number of digits outside 1..columns.
    """
    if not 1 <= digits <= grammar.columns:
        raise ValueError(f"digits must be between 1 and {grammar.columns}, got {digits}.")
    patterns = {(0,): (1, 0, 0)}  # carries so far: number of sums, and an example (a, b)
    for i in range(digits):
        longer: dict[tuple[int, ...], tuple[int, int, int]] = {}
        first = 1 if i == digits - 1 and digits > 1 else 0
        for carries, (count, a, b) in patterns.items():
            for x in range(first, 10):
                for y in range(first, 10):
                    key = (*carries, (x + y + carries[-1]) // 10)
                    before = longer.get(key, (0, a + x * 10**i, b + y * 10**i))
                    longer[key] = (before[0] + count, *before[1:])
        patterns = longer
    fits = [v for key, v in patterns.items() if digits < grammar.columns or not key[-1]]
    counts, a, b = np.array(fits).T
    return grammar.make_problems(a, b), counts / counts.sum()


def modal_answer(grammar: SumsGrammar, problems: Problems) -> Int[np.ndarray, " problem"]:
    """Compute the grammar's most likely answer to each problem, which a majority vote converges to.

    Go through all patterns of wrong columns of each writer, and add the probabilities of equal
    answers. Of equally likely answers, any one.
    """
    shape, powers = (len(problems), grammar.columns), 10 ** np.arange(grammar.columns)
    answers, masses = [], []
    for z, p_wrong in enumerate((grammar.careful_slip, grammar.forget, grammar.blurt_slip)):
        writer = np.full(len(problems), z)
        for pattern in product((False, True), repeat=grammar.columns):
            wrong = np.broadcast_to(np.array(pattern), shape)
            c, _, s, dropped = grammar.work_columns(problems, writer, wrong)
            factors = np.where(wrong, p_wrong, 1 - p_wrong)
            if z == 1:  # no choice without a carry
                factors = np.where(dropped | (c == 1), factors, ~wrong)
            masses.append(grammar.writer_probs(problems)[:, z] * factors.prod(1))
            answers.append(s @ powers)
    answer, mass = np.stack(answers, axis=1), np.stack(masses, axis=1)
    total = [((answer == column[:, None]) * mass).sum(1) for column in answer.T]
    return answer[np.arange(len(answer)), np.argmax(total, axis=0)]


class Outcomes(NamedTuple):
    """All kinds of text that the grammar writes, and the probability of each, by problem.

    right and units are True if the answer and its last digit are right; writer indexes WRITERS.
    Only blurt writes no steps, and if an answer with steps is right, all its steps are true.
    """

    mass: Float[np.ndarray, "problem cell"]
    right: Bool[np.ndarray, " cell"]
    units: Bool[np.ndarray, " cell"]
    steps: Bool[np.ndarray, " cell"]
    sure: Bool[np.ndarray, " cell"]
    writer: Int[np.ndarray, " cell"]

    @property
    def faithful(self) -> Bool[np.ndarray, " cell"]:
        """True for right answers with steps, which are then all true."""
        return self.steps & self.right


def outcome_mass(
    writer: Float[np.ndarray, "*rows writer"],
    right: Float[np.ndarray, "*rows writer"],
    units: Float[np.ndarray, "*rows writer"],
    sure: Float[np.ndarray, "*rows writer"],
) -> Float[np.ndarray, "*rows cell"]:
    """Compute the mass of `Outcomes` from P(writer), and each writer's three probabilities."""
    grades = np.stack([right, units - right, 1 - units], axis=-1)
    mass = (writer[..., None] * grades)[..., None] * np.stack([1 - sure, sure], -1)[..., None, :]
    return mass.reshape(*writer.shape[:-1], -1)


def outcomes(grammar: SumsGrammar, problems: Problems) -> Outcomes:
    """Compute the probability of every kind of text: 3 writers, 3 grades, with or without sure."""
    columns, writers = column_probability(grammar, problems), grammar.writer_probs(problems)
    right, sure = columns.prod(-1), np.full(writers.shape, grammar.sure)
    writer, grade, has_sure = (x.ravel() for x in np.indices((len(WRITERS), 3, 2)))
    return Outcomes(
        mass=outcome_mass(writers, right, columns[..., 0], sure),
        right=grade == 0,
        units=grade < 2,
        steps=writer < 2,
        sure=has_sure == 1,
        writer=writer,
    )


class TiltPoint(NamedTuple):
    """The exact optimum at one beta: means over problems, and KL in nats per sequence."""

    beta: float
    proxy: float
    true_reward: float
    kl_per_sequence: float
    sure: float
    writers: tuple[float, float, float]


def sums_frontier(
    cells: Outcomes,
    reward: Callable[[Outcomes], Float[np.ndarray, " cell"]],
    betas: Iterable[float],
    weight: Float[np.ndarray, " problem"] | None = None,
) -> list[TiltPoint]:
    """Compute the policy that maximizes E[reward] - beta KL(policy || grammar), for each beta.

    `tilt` applied to the outcomes of each problem: the highest reward at that KL.

    Args:
        cells: from `outcomes`.
        reward: from the outcomes to a score of each, such as `lambda x: x.right.astype(float)`.
        betas: KL coefficients above 0, per sequence.
        weight: of each problem, such as that of `carry_patterns`; equal by default.

    Raises ValueError for a beta that is not above 0.
    """
    mass, score = torch.from_numpy(cells.mass), np.asarray(reward(cells), dtype=np.float64)
    scores = torch.from_numpy(score).expand_as(mass)
    weight = np.ones(len(mass)) if weight is None else weight
    of_writer = (cells.writer == np.arange(len(WRITERS))[:, None]).astype(float)
    figures = np.stack([score, cells.right, cells.sure, *of_writer], axis=1)
    points = []
    for beta in betas:
        best = tilt(mass, scores, beta)
        kl = float(np.average(exact_kl(best, mass), weights=weight))
        proxy, true_reward, sure, *writers = np.average(
            best.numpy() @ figures, axis=0, weights=weight
        ).tolist()
        points.append(TiltPoint(beta, proxy, true_reward, kl, sure, tuple(writers)))
    return points
