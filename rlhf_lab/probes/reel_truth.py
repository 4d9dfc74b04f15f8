"""Ground truth of Reel text, in the shapes that probes use."""

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.graph import (
    Graph,
    GraphPolicy,
    build_graph,
    grammar_policy,
    token_information,
)
from rlhf_lab.organism.optimum import tilted
from rlhf_lab.organism.rewards import REWARDS, Reward, true_reward
from rlhf_lab.organism.truth import Optimum, Truth


class ReelTruth(Truth):
    """Exact values, advantages and beliefs about sequences of Reel tokens.

    "Exact" is under the grammar, which the bundled policy starts from: the value of a prefix is the
    expected reward when the grammar generates the rest. The graph of states is built on first use.

    Args:
        reward: whose expectation the values are; the true reward when None.
    """

    def __init__(self, reward: Reward | None = None) -> None:
        self.reward = reward or true_reward
        self.grammar = Grammar()

    @classmethod
    def of_reward(cls, reward_fn: str) -> "ReelTruth":
        """Return the truth for a reward's name; for rewards without an exact form the true one."""
        return cls(REWARDS.get(reward_fn, true_reward))

    @cached_property
    def graph(self) -> Graph:
        """The states of the grammar."""
        return build_graph(self.grammar)

    @cached_property
    def policy(self) -> GraphPolicy:
        """The grammar itself as a policy."""
        return grammar_policy(self.graph)

    @cached_property
    def state_values(self) -> tuple[Float[np.ndarray, " _"], ...]:
        """The value of every state at every position."""
        return self.policy.values(self.final_rewards[0])

    @cached_property
    def state_beliefs(self) -> tuple[Float[np.ndarray, " _"], ...]:
        """P(sentiment is positive) in every state at every position: the true reward's value."""
        return self.policy.values(true_reward.score(self.graph.final_features()))

    @cached_property
    def final_rewards(self) -> tuple[Float[np.ndarray, " state"], Float[np.ndarray, " state"]]:
        """The reward of every whole review's state, and the grammar's probability of it."""
        return self.reward.score(self.graph.final_features()), self.policy.occupancy()[-1]

    def slot_names(self, seq: int) -> list[str]:
        """A name per position, such as "CONN 2" (clauses counted from 1) or "VERB"."""
        names = [
            slot.name if slot.clause is None else f"{slot.name} {slot.clause + 1}"
            for slot in self.grammar.slots
        ]
        return (names + [f"+{i}" for i in range(seq)])[:seq]

    def values(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """The exact value after each token, and True before the first that is not grammatical."""
        return self._look_up(self.state_values, tokens)

    def beliefs(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """P(sentiment is positive | prefix) after each token, and a mask of defined ones."""
        return self._look_up(self.state_beliefs, tokens)

    def fits(self, tokens: Int[Tensor, "batch seq"], labels: Bool[Tensor, " batch"]) -> bool:
        """Return True if the labels can be the sentiment of these texts.

        False if they agree with the final posterior less than expected, by 4 standard errors.
        """
        belief, mask = (x.cpu() for x in self.beliefs(tokens))
        if not mask.any(1).all():
            return True  # not a review of the grammar: nothing is known
        last = mask.long().cumsum(1).argmax(1, keepdim=True)
        positive = belief.gather(1, last)[:, 0]
        expected = torch.maximum(positive, 1 - positive)
        agreeing = ((positive > 0.5) == labels.cpu()).double().mean()
        error = (expected * (1 - expected)).sum().sqrt() / len(labels)
        return bool(agreeing >= expected.mean() - 4 * error)

    @cached_property
    def information(self) -> Float[Tensor, " seq"]:
        """I_t, the variance of the reward that the token at each position settles; 0 for <bos>."""
        after_bos = token_information(self.policy, self.reward).float()
        return torch.cat([torch.zeros(1), after_bos])

    def optimum(self, beta: float) -> Optimum:
        """Return the best policy at this price of KL; raises ValueError unless beta is positive."""
        rewards, chances = self.final_rewards
        best, kl = tilted(chances, rewards, beta)
        return Optimum(beta, float(best @ rewards), kl)

    def reviews(
        self, n: int, seed: int = 0
    ) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, " batch"]]:
        """Fresh reviews, and True where the hidden sentiment is positive."""
        drawn = self.grammar.sample(n, np.random.default_rng(seed))
        return torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.latents.sentiment > 0)

    def eval_text(
        self, n: int, seed: int
    ) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"], Bool[Tensor, " batch"]]:
        """Fresh reviews, a mask without padding, and True where the sentiment is positive."""
        tokens, positive = self.reviews(n, seed)
        return tokens, torch.ones_like(tokens, dtype=torch.bool), positive

    def _look_up(
        self, table: tuple[Float[np.ndarray, " _"], ...], tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        within = min(tokens.shape[1], self.grammar.seq_len)
        found, mask = self.graph.look_up(table, tokens[:, :within])
        beyond = (0, tokens.shape[1] - within)
        return pad(found.float(), beyond).to(tokens.device), pad(mask, beyond).to(tokens.device)
