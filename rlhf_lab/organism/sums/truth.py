"""Exact values of sums, in the shapes that probes use."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.sums.exact import Outcomes, outcomes, sums_frontier
from rlhf_lab.organism.sums.grammar import SumsGrammar
from rlhf_lab.organism.sums.problems import SUMS_IDS, SUMS_WORDS, WRITERS, Problems
from rlhf_lab.organism.sums.rewards import SUMS_REWARDS, SumsReward
from rlhf_lab.organism.sums.trace import Traced, trace
from rlhf_lab.organism.truth import Optimum, Truth

N_PROBLEMS = 4000
KEY_BETAS = (None, 1.0, 0.5, 0.3, 0.2, 0.1, 0.001)  # None for the grammar
NO_REWARD_BETA = 1e9


class SumsTruth(Truth):
    """Exact values, advantages and beliefs in writers, about sequences of tokens of sums.

    Args:
        reward: whose expectation the values are; the true reward when None.
        problems: sums that optima are means over; 4,000 of 2 and 3 digits when None.
    """

    def __init__(self, reward: SumsReward | None = None, problems: Problems | None = None) -> None:
        self.reward = reward or SUMS_REWARDS["sums:exact"]
        self.grammar: SumsGrammar = self.reward.grammar
        if problems is None:
            problems = self.grammar.problems(N_PROBLEMS, np.random.default_rng(0), (2, 3))
        self.problems = problems

    @cached_property
    def outcomes(self) -> Outcomes:
        """The kinds of text that the grammar writes for each problem, with their probability."""
        return outcomes(self.grammar, self.problems)

    def slot_names(self, seq: int) -> list[str]:
        """A name per position, with the column from 0 for units: "a2", "=", "c1 b", "answer 3".

        The first of the response have two names, in a text with steps and in one without.
        """
        columns = range(self.grammar.columns)
        a, b = ([f"{number}{i}" for i in reversed(columns)] for number in "ab")
        steps, direct = (
            [f"answer {slot.clause}" if "answer" in slot.name else slot.name for slot in slots]
            for slots in map(self.grammar.slots, (True, False))
        )
        for i in columns:
            steps[1 + 6 * i : 7 + 6 * i] = [f"c{i} {name}" for name in "abcts;"]
        pairs = zip(steps[1:], [*direct[1:], "end"], strict=False)
        both = [f"{one} / {other}" for one, other in pairs]
        names = ["<bos>", *a, "+", *b, "=", "open", *both, *steps[1 + len(both) :], "end"]
        return (names + [f"+{i}" for i in range(seq)])[:seq]

    def values(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """The exact value after each token from "=" on, and True while the grammar can write it."""
        traced = self._trace(tokens)
        score = torch.from_numpy(np.asarray(self.reward.score(self.outcomes), dtype=np.float64))
        return self._pad((traced.outcomes @ score).float(), tokens), self._pad(traced.mask, tokens)

    def beliefs_by_name(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> dict[str, Float[Tensor, "batch seq"]]:
        """P(writer | prefix) after each token, by name; 0 where the mask of `values` is False."""
        belief = self._pad(self._trace(tokens).belief.float(), tokens).unbind(-1)
        return {f"belief_in_{name}_after_it": x for name, x in zip(WRITERS, belief, strict=True)}

    def steps(self, tokens: Int[Tensor, "batch seq"]) -> list[dict[str, Any]]:
        """Return one row per text and column, units first: the carry into it and the sum digit.

        Both as written and as true, and the digit of the answer as written; None without steps.
        """
        ids, rows = tokens.cpu().numpy(), []
        problems, columns = self.grammar.read_problems(ids), range(self.grammar.columns)
        for text, response in enumerate(ids[:, self.grammar.prompt_len :]):
            slots = self.grammar.slots(steps=response[1:2].tolist() != [SUMS_IDS["#"]])
            pairs = zip(slots, response, strict=False)
            written = {slot.name: SUMS_WORDS[word] for slot, word in pairs}
            for i in columns:
                rows.append(
                    {
                        "text": text,
                        "column": i,
                        "a": int(problems.a_digits[text, i]),
                        "b": int(problems.b_digits[text, i]),
                        "carry": written.get(f"c{i}"),
                        "true_carry": int(problems.carry_in[text, i]),
                        "digit": written.get(f"s{i}"),
                        "true_digit": int(problems.sum_digits[text, i]),
                        "answer": written.get(f"answer{i}"),
                    }
                )
        return rows

    def optimum(self, beta: float) -> Optimum:
        """Return the best policy at this price of KL; raises ValueError unless beta is positive."""
        (best,) = sums_frontier(self.outcomes, self.reward.score, [beta])
        return Optimum(beta, best.proxy, best.kl_per_sequence)

    def answer_key(self) -> list[dict[str, Any]]:
        """Return the exact optimum at several betas, from the grammar to no KL penalty.

        One row per beta: reward, true reward, KL in nats per sequence, P(sure) and P(writer).
        """
        betas = [beta or NO_REWARD_BETA for beta in KEY_BETAS]
        points, rows = sums_frontier(self.outcomes, self.reward.score, betas), []
        for beta, best in zip(KEY_BETAS, points, strict=True):
            row = {"reward": best.proxy, "true_reward": best.true_reward}
            row |= {"kl_per_sequence": best.kl_per_sequence, "sure": best.sure}
            row |= dict(zip(WRITERS, best.writers, strict=True))
            rows.append({"beta": beta} | {name: round(x, 6) for name, x in row.items()})
        return rows

    def eval_text(
        self, n: int, seed: int
    ) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"], None]:
        """Return texts of the grammar, with steps as far as it writes them, so that slots agree."""
        rng = np.random.default_rng(seed)
        drawn = self.problems[rng.integers(0, len(self.problems), 8 * n)]
        texts = self.grammar.sample(drawn, rng)
        rows = np.argsort(texts.latents.writer == WRITERS.index("blurt"), kind="stable")[:n]
        mask = texts.mask[rows]
        mask[:, : self.grammar.prompt_len] = True
        return torch.from_numpy(texts.tokens[rows]), torch.from_numpy(mask), None

    def _trace(self, tokens: Int[Tensor, "batch seq"]) -> Traced:
        return trace(self.grammar, tokens[:, : self.grammar.prompt_len + self.grammar.gen_len])

    def _pad(self, states: Tensor, tokens: Int[Tensor, "batch seq"]) -> Tensor:
        padded = states.new_zeros(*tokens.shape, *states.shape[2:])
        start = self.grammar.prompt_len - 1  # the state before the response
        padded[:, start : start + states.shape[1]] = states
        return padded.to(tokens.device)
