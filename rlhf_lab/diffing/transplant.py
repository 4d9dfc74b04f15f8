"""Weight transplants: the reward of groups of weights, added, removed, and by Shapley value."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.config.checks import AT_LEAST_1, check_range
from rlhf_lab.diffing.groups import Groups, check_partition, taken_from, weights_of_both
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.models import TransformerWithValueHead, merged_copy
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import score_texts
from rlhf_lab.sampling import sample, tokenize_prompts
from rlhf_lab.sampling_spec import SamplingSpec

MOST_EXACT = 8  # groups of which all coalitions are tried
PERMUTATIONS = 60  # random orders for more groups
ROWS_WRITTEN = 256
CoalitionPairs = tuple[Tensor, Tensor, Tensor]  # rows with a group and without it, and weights


@dataclass(frozen=True)
class Transplant:
    """Rewards of models with some groups of weights of the tuned model, and the base's rest.

    Args:
        groups: names of the groups.
        members: True where a coalition takes the group from the tuned model.
        rewards: of the samples of each coalition, with the same noise in every row of a column.
        pairs: coalitions with and without each group, whose weighted differences are its Shapley
            value.
    """

    groups: list[str]
    members: Bool[Tensor, "coalition group"]
    rewards: Float[Tensor, "coalition n"]
    pairs: list[CoalitionPairs]

    @property
    def gain(self) -> Float[Tensor, " n"]:
        """Reward of the tuned model minus that of the base, for each sample."""
        return self.rewards[self.row(range(len(self.groups)))] - self.rewards[self.row([])]

    def row(self, members: Sequence[int]) -> int:
        """Return the row of a coalition, by the indices of its groups."""
        chosen = torch.zeros(len(self.groups), dtype=torch.bool)
        chosen[list(members)] = True
        return int((self.members == chosen).all(1).nonzero()[0, 0])

    def put_in(self) -> Interval:
        """Return the gain of the base by each group alone: sufficiency. `[group]`, over samples."""
        alone = [self.rewards[self.row([g])] for g in range(len(self.groups))]
        return bootstrap_means((torch.stack(alone) - self.rewards[self.row([])]).T)

    def taken_out(self) -> Interval:
        """Return the loss of the tuned model without each group: necessity. `[group]`."""
        every = range(len(self.groups))
        rest = [self.rewards[self.row([h for h in every if h != g])] for g in every]
        return bootstrap_means((self.rewards[self.row(every)] - torch.stack(rest)).T)

    def shapley(self) -> Interval:
        """Return each group's mean gain over all orders in which groups can be added. `[group]`.

        (Shapley 1953)
        """
        rewards = self.rewards.double()
        # by pairs, so the value of an unchanged group is exactly 0
        gains = [weights @ (rewards[these] - rewards[rest]) for these, rest, weights in self.pairs]
        return bootstrap_means(torch.stack(gains, 1))


@torch.no_grad()
def transplant(
    model0: HookedModel,
    model1: HookedModel,
    groups: Groups,
    reward: Callable[[list[str]], Float[Tensor, " batch"]],
    n: int,
    seed: int,
    prompts: Sequence[str] | Sequence[Sequence[int]] = ("this movie",),
    spec: SamplingSpec | None = None,
) -> Transplant:
    """Measure the reward of the base with the tuned weights of every coalition of groups.

    1. List the coalitions: all of up to eight groups; else those along 60 random orders, and each
       group alone and left out.
    2. Put the tuned weights of a coalition into a copy of the base.
    3. Draw n samples, with the same noise for each coalition, and score them.

    The coalition of no groups is bitwise the first model, that of all groups the second.

    Args:
        reward: from texts to numbers.
        prompts: texts, or token ids; repeated for n samples.
        spec: of sampling; if None, a review of Reel at temperature 1.

    J(S) = E[reward] of the base with the weights of S;
    Shapley_g = sum over S without g of |S|! (G - |S| - 1)! / G! (J(S + g) - J(S))

    Raises:
        ConfigError: If parameters differ, the groups are not a partition, or a reward is nan.
    """
    check_range(AT_LEAST_1, n=n, prompts=len(prompts))
    before, after = weights_of_both(model0, model1)
    check_partition(groups, before)
    members, pairs = transplant_plan(len(groups), seed)
    policy, ids = TransformerWithValueHead(merged_copy(model0)), prompt_ids(model0, prompts, n)
    spec, rewards = spec or SamplingSpec(gen_len=26), []
    for chosen in members:
        parts = [part for g in chosen.nonzero()[:, 0] for part in groups.parts[g]]
        weights = taken_from(after, before, parts)
        for name, parameter in policy.base_model.named_parameters():
            parameter.copy_(weights[name])
        generator = torch.Generator().manual_seed(seed)
        samples = sample(policy, ids, spec, generator, part_size=ROWS_WRITTEN)
        rewards.append(score_texts(reward, samples.texts(model0.tokenizer), "reward").cpu())
    return Transplant(list(groups.names), members, torch.stack(rewards), pairs)


def transplant_plan(
    n_groups: int, seed: int
) -> tuple[Bool[Tensor, "coalition group"], list[CoalitionPairs]]:
    """Return the coalitions to try, and the pairs of them for each group's Shapley value."""
    every, rows = range(n_groups), {}
    row = lambda groups: rows.setdefault(frozenset(groups), len(rows))
    times: list[Counter] = [Counter() for _ in every]  # of each pair of rows, by group
    orders = [*permutations(every)] if n_groups <= MOST_EXACT else _random_orders(n_groups, seed)
    for order in orders:
        for k, g in enumerate(order):
            times[g][row(order[: k + 1]), row(order[:k])] += 1
    for g in every:  # for `put_in` and `taken_out`
        row([g]), row({*every} - {g})
    members = torch.tensor([[g in chosen for g in every] for chosen in rows])
    return members, [
        (
            *torch.tensor([*counts]).unbind(1),
            torch.tensor([*counts.values()], dtype=torch.float64) / len(orders),
        )
        for counts in times
    ]


def _random_orders(n_groups: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    half = [torch.randperm(n_groups, generator=generator) for _ in range(PERMUTATIONS // 2)]
    return [order.tolist() for order in (*half, *(order.flip(0) for order in half))]  # antithetic


def prompt_ids(
    model: HookedModel, prompts: Sequence[str] | Sequence[Sequence[int]], n: int
) -> list[list[int]]:
    """Return the prompt of each sample as token ids, with BOS before texts if it exists."""
    if isinstance(prompts[0], str):
        has_bos = model.tokenizer.bos_token_id is not None
        prompts = tokenize_prompts(model.tokenizer, prompts, has_bos)
    return [list(prompts[i % len(prompts)]) for i in range(n)]
