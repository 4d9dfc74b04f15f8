"""Checks of a transplant: ends, sums, and coalitions built again under their stored names."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.groups import Groups
from rlhf_lab.diffing.transplant import ROWS_WRITTEN, Transplant, prompt_ids
from rlhf_lab.diffing.weights import graft_groups
from rlhf_lab.identity import Check
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead, same_weights
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec


def check_transplant(
    found: Transplant,
    model0: HookedTransformer,
    model1: HookedTransformer,
    groups: Groups,
    reward: Callable[[list[str]], Float[Tensor, " batch"]],
    seed: int,
    prompts: Sequence[str] | Sequence[Sequence[int]] = ("this movie",),
    spec: SamplingSpec | None = None,
    anew: int = 4,
) -> list[Check]:
    """Hold a transplant to grafts that are made again by the names that it has.

    1. All groups together are the tuned model, bit for bit.
    2. Shapley values sum to the gain of every sample.
    3. The coalitions of none and of all, one group alone, one left out, and others at random, are
       grafted by name, and write again: their rewards, and the figures of put in, taken out and KL.

    Args:
        anew: how many coalitions besides none and all.
    """
    spec = spec or SamplingSpec(gen_len=26)
    rng, n_groups = np.random.default_rng(seed), len(found.groups)
    ids = prompt_ids(model0, prompts, found.rewards.shape[1])

    def write(members: list[int]) -> tuple[Float[Tensor, " n"], float]:
        names = [found.groups[g] for g in members]
        policy = TransformerWithValueHead(graft_groups(model0, model1, groups, names))
        generator = torch.Generator().manual_seed(seed)
        samples = sample(policy, ids, spec, generator, part_size=ROWS_WRITTEN)
        kl = _kl_anew(model0, policy.base_model, samples, spec.temperature)
        return reward(samples.texts(model0.tokenizer)).detach().cpu().float(), kl

    every, one = list(range(n_groups)), int(rng.integers(n_groups))
    chosen = {"none": [], "all": every, "in": [one], "out": [g for g in every if g != one]}
    tried = rng.permutation(len(found.members))[: max(0, anew - 2)]
    chosen |= {f"row {row}": found.members[row].nonzero()[:, 0].tolist() for row in tried}
    made = {name: write(members) for name, members in chosen.items()}
    differ = max(
        (found.rewards[found.place(chosen[name])] != rewards).double().mean().item()
        for name, (rewards, _) in made.items()
    )
    mean = {name: rewards.double().mean().item() for name, (rewards, _) in made.items()}
    singles = max(
        abs(found.put_in().value[one].item() - (mean["in"] - mean["none"])),
        abs(found.taken_out().value[one].item() - (mean["all"] - mean["out"])),
    )
    off = max(
        abs(found.kl[found.place(chosen[name])].item() - kl) / (1 + kl)
        for name, (_, kl) in made.items()
    )
    whole = graft_groups(model0, model1, groups, found.groups)
    summed = (found.shares.sum(0) @ found.rewards.double() - found.gain.double()).abs().max()
    direct = abs(found.shapley().value[one].item() - _by_size(found, one))
    exact = (found.shapley().value.sum() - (mean["all"] - mean["none"])).abs().item()
    return [
        Check.at_most("all groups are the tuned model", float(not same_weights(whole, model1)), 0),
        Check.at_most("Shapley values sum to the gain", max(summed.item(), exact), 1e-6),
        Check.at_most("a Shapley value is that of its sizes' means", direct, 1e-6),
        Check.at_most("coalitions built again by name earn the same", differ, 0.0),
        Check.at_most("put in and taken out are those built again", singles, 1e-6),
        Check.at_most("the KL is that of whole logits", off, 1e-3),
    ]


def _by_size(found: Transplant, group: int) -> float:
    """A Shapley value as the mean over sizes of what a group adds to coalitions of that size.

    From drawn orders it cannot be had so, and is given as stored.
    """
    if found.orders is not None:
        return found.shapley().value[group].item()
    rows = {
        tuple(row.tolist()): reward
        for row, reward in zip(found.members, found.rewards, strict=True)
    }
    adds: dict[int, list[float]] = {}
    for members, reward in rows.items():
        if not members[group]:
            joined = tuple(m or g == group for g, m in enumerate(members))
            gained = (rows[joined].double() - reward.double()).mean().item()
            adds.setdefault(sum(members), []).append(gained)
    return sum(sum(each) / len(each) for each in adds.values()) / len(adds)


@torch.no_grad()
def _kl_anew(
    base: HookedTransformer, model: HookedTransformer, samples: Samples, temperature: float
) -> float:
    """The mean KL of a model from the base along samples, by whole logits of the modules."""
    logs = []
    for each in (model, base):
        run = lambda tokens, each=each: (each(tokens, attention_mask=torch.ones_like(tokens)),)
        logits = run_left_padded(run, samples.tokens, samples.attention_mask)[0]
        logits = logits[:, samples.prefix_len - 1 : -1].double() / temperature
        logs.append(logits.log_softmax(-1))
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    return (kl * samples.mask).sum(1).mean().item()
