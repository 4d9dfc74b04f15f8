"""Transplants: grafts by name, Shapley values by another formula, and unchanged groups."""

import copy
import itertools

import pytest
import torch

from rlhf_lab.diffing import Groups, coarse_groups, graft_groups, transplant
from rlhf_lab.diffing.transplant import transplant_plan
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec

N, SPEC = 8, SamplingSpec(gen_len=4, temperature=0.8)
PROMPTS = [[0, 2], [0, 2, 8, 10]]


def count_letters(texts):
    return torch.tensor([sum(len(word) for word in text.split()) / 10 for text in texts])


@pytest.fixture(scope="module")
def wild(base, make_tuned):
    """A model so far from the base that a few samples differ."""
    return make_tuned(base, size=0.7)


@pytest.fixture(scope="module")
def groups(base):
    """Embeddings with block 0, block 1, and the unembedding."""
    parts = coarse_groups(base).parts
    cuts = ((0, 3), (3, 5), (5, 7))
    return Groups(["lower", "upper", "last"], [sum(parts[a:b], []) for a, b in cuts])


def test_coalitions_match_grafts_by_name(base, wild, groups, no_type_checks):
    weights, state = copy.deepcopy(base.state_dict()), torch.random.get_rng_state()
    found = transplant(base, wild, groups, count_letters, N, 3, prompts=PROMPTS, spec=SPEC)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(weight, weights[name]) for name, weight in base.state_dict().items())
    assert found.members.shape == (8, 3) and found.gain.abs().max() > 0
    rewards = {}
    for size in range(4):
        for chosen in itertools.combinations(range(3), size):
            names = [groups.names[g] for g in chosen]
            policy = TransformerWithValueHead(graft_groups(base, wild, groups, names))
            samples = sample(policy, PROMPTS * (N // 2), SPEC, torch.Generator().manual_seed(3))
            rewards[chosen] = count_letters(samples.texts(base.tokenizer))
            assert torch.equal(found.rewards[found.row(chosen)], rewards[chosen]), names
    total = torch.zeros(3, N, dtype=torch.float64)
    for order in itertools.permutations(range(3)):
        for k, g in enumerate(order):
            ends = (tuple(sorted(order[:j])) for j in (k, k + 1))
            before, after = (rewards[end].double() for end in ends)
            total[g] += (after - before) / 6
    torch.testing.assert_close(found.shapley().value, total.mean(1))
    for g in range(3):
        rest = tuple(h for h in range(3) if h != g)
        alone, lost = rewards[(g,)] - rewards[()], rewards[(0, 1, 2)] - rewards[rest]
        torch.testing.assert_close(found.put_in().value[g], alone.double().mean())
        torch.testing.assert_close(found.taken_out().value[g], lost.double().mean())


def test_many_groups_are_added_along_random_orders():
    """Each group is worth its number, and the first two 4 more together: 2 each by Shapley."""
    members, pairs = transplant_plan(9, seed=1)
    assert len(members.unique(dim=0)) == len(members) < 2**9
    worth = members.double() @ torch.arange(9.0).double() + (members[:, 0] & members[:, 1]) * 4.0
    values = torch.stack([weights @ (worth[a] - worth[b]) for a, b, weights in pairs])
    torch.testing.assert_close(values, torch.tensor([2.0, 3, 2, 3, 4, 5, 6, 7, 8]).double())
    assert all((members[a].sum(1) == members[b].sum(1) + 1).all() for a, b, _ in pairs)
    assert torch.equal(transplant_plan(9, seed=1)[0], members)


def test_transplant_raises_on_invalid_rewards_and_groups(base, wild, groups):
    with pytest.raises(ConfigError, match="reward returned nan for the text"):
        transplant(base, wild, groups, lambda texts: [float("nan")] * len(texts), 4, 1)
    with pytest.raises(ConfigError, match="leave out"):
        transplant(base, wild, Groups(groups.names[:1], groups.parts[:1]), count_letters, 2, 3)
