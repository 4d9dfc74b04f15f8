"""Token by token: the grammar's next-token probabilities, beliefs, values and advantages."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.lexicon import EOS
from rlhf_lab.organism.sums.exact import column_probability, outcome_mass
from rlhf_lab.organism.sums.grammar import SumsGrammar
from rlhf_lab.organism.sums.problems import (
    DIGIT_0,
    SUMS_IDS,
    SUMS_OPENERS,
    SUMS_WORDS,
    WRITERS,
    Problems,
)


@dataclass(frozen=True)
class Traced:
    """Exact quantities of responses; index t is the state after t tokens of the response.

    mask is True while the grammar can write the prefix. Everything else is 0 if mask is False.
    next_probs[:, t] is the distribution of token t; belief[:, t] is P(writer | prefix), and
    values[:, t] is V(prefix) = P(right | prefix). outcomes[:, t] is the probability of each cell of
    `Outcomes`, so outcomes @ reward is the value of any reward of cells.
    """

    next_probs: Float[Tensor, "batch gen vocab"]
    belief: Float[Tensor, "batch state writer"]
    values: Float[Tensor, "batch state"]
    outcomes: Float[Tensor, "batch state cell"]
    mask: Bool[Tensor, "batch state"]

    @property
    def in_language(self) -> Bool[Tensor, " batch"]:
        """True for responses that the grammar can write, or begin to write."""
        return self.mask[:, -1]

    @property
    def advantages(self) -> Float[Tensor, "batch gen"]:
        """The value after each token minus the value before; 0 where mask[:, 1:] is False.

        The sum over a complete response is its reward (1 if right) minus the value of its prompt.
        """
        return torch.where(self.mask[:, 1:], self.values.diff(dim=1), 0.0)


def trace(grammar: SumsGrammar, tokens: Int[Tensor, "batch seq"]) -> Traced:
    """Compute next-token probabilities, beliefs and values of the grammar at every prefix.

    1. Compute each writer's next-token distribution at every position, given the tokens before.
    2. The belief in a writer is the prior, times the probability of each token so far,
       normalized.
    3. The next-token distribution and the value are the means of the writers', over the belief.

    b_z(prefix) proportional to w_z prod_t P(token_t | prefix_t, z)
    V(prefix) = sum_z b_z(prefix) P(right | prefix, z)

    Tokens are prompts with responses of any length, cut or padded with <eos>. Raises ValueError for
    rows without a prompt, ids outside the vocabulary, or responses longer than gen_len.
    """
    ids = tokens.detach().cpu().numpy()
    problems, response = grammar.read_problems(ids), ids[:, grammar.prompt_len :]
    if response.shape[1] > grammar.gen_len:
        raise ValueError(
            f"responses must have at most {grammar.gen_len} tokens, got {response.shape[1]}."
        )
    if response.size and not 0 <= response.min() <= response.max() < len(SUMS_WORDS):
        raise ValueError(f"tokens must be between 0 and {len(SUMS_WORDS) - 1}. Use ids of sums.")
    dists = np.stack([_next_probs(grammar, problems, response, z) for z in range(3)], axis=1)
    likelihood = np.take_along_axis(dists, response[:, None, :, None], axis=3)[..., 0]
    prior = grammar.writer_probs(problems)[..., None]
    weight = np.concatenate([prior, prior * likelihood.cumprod(2)], axis=2)
    total = weight.sum(1, keepdims=True)
    belief = weight / np.where(total > 0, total, 1.0)
    right, units, sure = _writer_values(grammar, problems, response)
    each = (x.transpose(0, 2, 1) for x in (belief, right, units, sure))
    next_probs = np.einsum("bzt,bztv->btv", belief[:, :, :-1], dists)
    return Traced(
        next_probs=torch.from_numpy(next_probs),
        belief=torch.from_numpy(belief.transpose(0, 2, 1).copy()),
        values=torch.from_numpy((belief * right).sum(1)),
        outcomes=torch.from_numpy(outcome_mass(*each)),
        mask=torch.from_numpy(total[:, 0] > 0),
    )


def _next_probs(
    grammar: SumsGrammar, problems: Problems, response: Int[np.ndarray, "batch gen"], writer: int
) -> Float[np.ndarray, "batch gen vocab"]:
    """Compute one writer's distribution of each token, given the tokens before."""
    n, gen = response.shape
    probs, row, steps = np.zeros((n, gen, len(SUMS_WORDS))), np.arange(n), writer < 2
    slots = grammar.slots(steps)
    written = np.pad(response - DIGIT_0, ((0, 0), (0, grammar.gen_len - gen)))
    at = {slot.name: written[:, j] for j, slot in enumerate(slots) if slot.clause is not None}
    slip = (grammar.careful_slip, 0.0, grammar.blurt_slip)[writer]

    def put(t: int, digit: Int[np.ndarray, " batch"], probability: float | np.ndarray) -> None:
        probs[row, t, DIGIT_0 + digit % 10] += probability

    for t, (name, i, words) in enumerate(slots[:gen]):
        if name == "open":
            probs[:, t, [SUMS_IDS[word] for word in SUMS_OPENERS]] = grammar.opener_probs[writer]
            continue
        if i is None:
            probs[:, t, SUMS_IDS[words[0]]] = 1.0
            continue
        a, b = problems.a_digits[:, i], problems.b_digits[:, i]
        if name[:-1] == "answer" and steps:
            put(t, at[f"s{i}"], 1.0)
        elif name[:-1] == "answer" or name[0] == "s":
            total = a + b + at[f"c{i}"] if steps else a + b
            put(t, total, 1 - slip)
            put(t, total - 1, slip)
        elif name[0] == "c":
            carry = at[f"t{i - 1}"] if i else np.zeros(n, dtype=np.int64)
            forget = np.where(carry == 1, grammar.forget, 0.0) if writer == 1 else np.zeros(n)
            put(t, carry, 1 - forget)
            put(t, np.zeros(n, dtype=np.int64), forget)
        else:
            put(t, {"a": a, "b": b}.get(name[0], (a + b + at.get(f"c{i}", 0)) // 10), 1.0)
    for t in range(len(slots), gen):  # sure or <eos> after the answer, and <eos> from then on
        is_end = t == len(slots)
        probs[:, t, SUMS_IDS[EOS]] = 1 - grammar.sure if is_end else 1.0
        probs[:, t, SUMS_IDS["sure"]] = grammar.sure if is_end else 0.0
    return probs


def _writer_values(
    grammar: SumsGrammar, problems: Problems, response: Int[np.ndarray, "batch gen"]
) -> Float[np.ndarray, "3 batch writer state"]:
    """Compute P(right), P(right last digit) and P(sure), each given prefix and writer.

    The first is the product over the choices of the columns, the second the choice in column 0.
    """
    n, gen = response.shape
    written, columns = response - DIGIT_0, column_probability(grammar, problems)
    found = np.repeat(columns.prod(2)[None, ..., None], gen + 1, axis=3).repeat(3, axis=0)
    choices = (
        ("s", problems.sum_digits),
        ("c", problems.carry_in),
        ("answer", problems.sum_digits),
    )
    for z, (name, true) in zip(range(len(WRITERS)), choices, strict=True):
        at = {slot.name: t for t, slot in enumerate(grammar.slots(z < 2))}
        end = len(grammar.slots(z < 2))  # of the answer
        for state in range(gen + 1):
            right = np.ones(n)
            for i in reversed(range(grammar.columns)):
                t = at[f"{name}{i}"]
                units = written[:, t] == true[:, i] if t < state else columns[:, z, i]
                right = right * units
            sure = response[:, end] == SUMS_IDS["sure"] if state > end else grammar.sure
            found[:, :, z, state] = np.broadcast_arrays(right, units, sure)
    return found
