"""Weight transplants: which part's change earns the reward, put in, taken out, and by Shapley."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, check_partition, taken_from, weights_of_both
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, bootstrap_means, kl_per_sequence
from rlhf_lab.models import TransformerWithValueHead, compare_with_reference, merged_copy
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.organism import grammatical
from rlhf_lab.organism.tokenizer import speaks_reel
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import sample, tokenize_prompts
from rlhf_lab.sampling_spec import SamplingSpec

MOST_EXACT = 8
"""Groups of which all coalitions are tried; above, `PERMUTATIONS` orders are drawn."""
PERMUTATIONS = 60
ROWS_WRITTEN = 256


@dataclass(frozen=True)
class Transplant:
    """What models earn that have some groups of weights from the tuned model, and the base's rest.

    Args:
        groups: their names.
        members: of each coalition, which groups are the tuned model's.
        rewards: of what each coalition writes; the same noise in every row of a column.
        grammatical: the share of each coalition's texts that are reviews; None off Reel.
        kl: of each coalition from the base, in nats per sequence, along its own texts.
        shares: the weights with which the rewards of coalitions sum to each Shapley value.
        orders: the same by drawn permutation, where not all coalitions were tried.
    """

    groups: list[str]
    members: Bool[Tensor, "coalition group"]
    rewards: Float[Tensor, "coalition n"]
    grammatical: Float[Tensor, " coalition"] | None
    kl: Float[Tensor, " coalition"]
    shares: Float[Tensor, "group coalition"]
    orders: Float[Tensor, "permutation group coalition"] | None = None

    @property
    def gain(self) -> Float[Tensor, " n"]:
        """What the tuned model earns more than the base, sample by sample."""
        return self.rewards[self.place(range(len(self.groups)))] - self.rewards[self.place([])]

    def place(self, members: Sequence[int]) -> int:
        """The row of a coalition, by the numbers of its groups."""
        wanted = torch.zeros(len(self.groups), dtype=torch.bool)
        wanted[list(members)] = True
        return int((self.members == wanted).all(1).nonzero()[0, 0])

    def put_in(self) -> Interval:
        """What each group alone earns the base: what suffices. `[group]`, over samples."""
        alone = [self.rewards[self.place([g])] for g in range(len(self.groups))]
        return bootstrap_means((torch.stack(alone) - self.rewards[self.place([])]).T)

    def taken_out(self) -> Interval:
        """What the tuned model loses without each group: what is needed. `[group]`."""
        every = range(len(self.groups))
        rest = [self.rewards[self.place([h for h in every if h != g])] for g in every]
        return bootstrap_means((self.rewards[self.place(every)] - torch.stack(rest)).T)

    def shapley(self) -> Interval:
        """Each group's share of the gain, over all orders in which groups can be put in. `[group]`.

        (Shapley 1953)
        """
        number = {tuple(row): index for index, row in enumerate(self.members.tolist())}
        found = []
        for g, share in enumerate(self.shares):
            rows = (self.members[:, g] & (share != 0)).nonzero()[:, 0]
            without = self.members[rows].clone()
            without[:, g] = False
            partners = [number[tuple(row)] for row in without.tolist()]
            # pair by pair, so that a group that changes nothing gets exactly 0
            added = self.rewards[rows].double() - self.rewards[partners].double()
            found.append(share[rows] @ added)
        return bootstrap_means(torch.stack(found, 1))

    def shapley_by_orders(self) -> Interval | None:
        """The Shapley values with the interval of the drawn orders, sampling aside; None without
        any.
        """
        if self.orders is None:
            return None
        return bootstrap_means(self.orders @ self.rewards.double().mean(1))


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
    """Measure what the base earns with the tuned weights of every coalition of groups.

    1. List the coalitions: all of them for up to eight groups; else those along 60 orders and their
       reverses, and each group alone and left out.
    2. Put the tuned weights of a coalition into a copy of the base.
    3. Sample n texts with one and the same noise for each coalition, and score them.

    The first model alone is the coalition of none, the second that of all, bit for bit.

    Args:
        reward: from texts to numbers.
        prompts: texts, or token ids; dealt out in turn to the n samples.
        spec: how to sample; a review of Reel at temperature 1 when None.

    J(S) = E[reward] of the base with the weights of S;
    Shapley_g = sum over S without g of |S|! (G - |S| - 1)! / G! (J(S + g) - J(S))

    Raises:
        ConfigError: unlike models, groups that are no partition, or n below 2.
    """
    before, after = weights_of_both(model0, model1)
    check_partition(groups, before)
    if n < 2:
        raise ConfigError(f"n={n} is too small; sample at least 2 texts, such as 256.")
    members, shares, orders = transplant_plan(len(groups), seed)
    writer = Writer(model0, prompt_ids(model0, prompts, n), spec or SamplingSpec(gen_len=26), seed)
    rewards, reviews, kl = [], [], []
    for chosen in members:
        parts = [part for g in chosen.nonzero()[:, 0] for part in groups.parts[g]]
        samples = writer.write(taken_from(after, before, parts))
        texts = samples.texts(writer.tokenizer)
        rewards.append(reward(texts).detach().cpu().float())
        reviews.append(writer.share_of_reviews(texts))
        kl.append(writer.kl_from_base(samples))
    known = None if None in reviews else torch.tensor(reviews)
    return Transplant(
        list(groups.names), members, torch.stack(rewards), known, torch.tensor(kl), shares, orders
    )


class Writer:
    """A copy of a model that samples from the same prompts with the same noise each time.

    Args:
        prompts: token ids, one for each sample.
    """

    def __init__(
        self, model: HookedModel, prompts: list[list[int]], spec: SamplingSpec, seed: int
    ) -> None:
        self.base, self.prompts, self.spec, self.seed = model, prompts, spec, seed
        self.policy, self.tokenizer = TransformerWithValueHead(merged_copy(model)), model.tokenizer

    @torch.no_grad()
    def write(self, weights: dict[str, Tensor]) -> Samples:
        """What the model writes with these weights."""
        for name, parameter in self.policy.base_model.named_parameters():
            parameter.copy_(weights[name])
        generator = torch.Generator().manual_seed(self.seed)
        return sample(self.policy, self.prompts, self.spec, generator, part_size=ROWS_WRITTEN)

    def share_of_reviews(self, texts: list[str]) -> float | None:
        """The share of texts that are grammatical; None where the tokenizer is not Reel's."""
        if not speaks_reel(self.tokenizer):
            return None
        return grammatical(texts).float().mean().item()

    def kl_from_base(self, samples: Samples) -> float:
        """The exact KL from the base along what was written, in nats per sequence."""
        model, temperature = self.policy.base_model, self.spec.temperature
        kl = compare_with_reference(model, self.base, samples, temperature, ROWS_WRITTEN).kl
        return kl_per_sequence(kl, samples.mask).mean().item()


def transplant_plan(
    n_groups: int, seed: int
) -> tuple[
    Bool[Tensor, "coalition group"],
    Float[Tensor, "group coalition"],
    Float[Tensor, "permutation group coalition"] | None,
]:
    """Which coalitions to try, how they sum to Shapley values, and to those of each drawn order."""
    every = range(n_groups)
    if n_groups <= MOST_EXACT:
        found = [tuple(s) for size in range(n_groups + 1) for s in combinations(every, size)]
        return _members(found, n_groups), _shapley_shares(found, n_groups), None
    generator = torch.Generator().manual_seed(seed)
    half = [
        torch.randperm(n_groups, generator=generator).tolist() for _ in range(PERMUTATIONS // 2)
    ]
    drawn = [order for each in half for order in (each, each[::-1])]  # antithetic: and its reverse
    sets = [(), tuple(every), *((g,) for g in every)]
    sets += [tuple(h for h in every if h != g) for g in every]
    sets += [tuple(sorted(order[:k])) for order in drawn for k in range(1, n_groups)]
    found = list(dict.fromkeys(sets))
    number = {chosen: row for row, chosen in enumerate(found)}
    orders = torch.zeros(len(drawn), n_groups, len(found), dtype=torch.float64)
    for row, order in enumerate(drawn):
        for k, g in enumerate(order):
            orders[row, g, number[tuple(sorted(order[: k + 1]))]] += 1
            orders[row, g, number[tuple(sorted(order[:k]))]] -= 1
    return _members(found, n_groups), orders.mean(0), (orders[::2] + orders[1::2]) / 2


def _members(found: list[tuple[int, ...]], n_groups: int) -> Bool[Tensor, "coalition group"]:
    return torch.tensor([[g in chosen for g in range(n_groups)] for chosen in found])


def _shapley_shares(
    found: list[tuple[int, ...]], n_groups: int
) -> Float[Tensor, "group coalition"]:
    """The weight of each coalition in each group's Shapley value, all of them tried."""
    shares = torch.zeros(n_groups, len(found), dtype=torch.float64)
    for row, chosen in enumerate(found):
        for g in range(n_groups):
            inside = g in chosen
            others = len(chosen) - inside
            weight = math.factorial(others) * math.factorial(n_groups - others - 1)
            shares[g, row] = (1 if inside else -1) * weight / math.factorial(n_groups)
    return shares


def prompt_ids(
    model: HookedModel, prompts: Sequence[str] | Sequence[Sequence[int]], n: int
) -> list[list[int]]:
    """The prompt of each sample, as token ids, with BOS in front of texts where there is one."""
    if not len(prompts):
        raise ConfigError("prompts is empty; give at least one.")
    given = list(prompts)
    if isinstance(given[0], str):
        bos = model.tokenizer.bos_token_id is not None
        given = tokenize_prompts(model.tokenizer, given, bos)
    return [list(given[i % len(given)]) for i in range(n)]
