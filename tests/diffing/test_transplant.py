"""Transplants: plants, Shapley values by another formula, and faults that the checks tell."""

import copy
import itertools

import pytest
import torch

from rlhf_lab.diffing import Groups, coarse_groups, fine_groups, transplant
from rlhf_lab.diffing.transplant import transplant_plan
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import true_reward
from rlhf_lab.sampling_spec import SamplingSpec
from tests.diffing.faults_transplant import TRANSPLANT_FAULTS
from tests.diffing.transplant_checks import check_transplant
from tests.probes.planting import planted

N = 8
SPEC = SamplingSpec(gen_len=4, temperature=0.8)


def count_was(texts):
    """A reward that every text has some of."""
    return torch.tensor([sum(len(word) for word in text.split()) / 10 for text in texts])


@pytest.fixture(scope="module")
def groups(base):
    """Three groups: embeddings with block 0, block 1, and what reads them out."""
    coarse = coarse_groups(base)
    cuts = ((0, 3), (3, 5), (5, 7))
    parts = [[p for some in coarse.parts[a:b] for p in some] for a, b in cuts]
    return Groups(["lower", "upper", "head"], parts)


@pytest.fixture(scope="module")
def far(base, make_tuned):
    return make_tuned(base, size=0.7)


@pytest.fixture(scope="module")
def found(base, far, groups):
    return transplant(base, far, groups, count_was, N, 3, spec=SPEC)


@pytest.mark.slow
def test_the_checks_hold_and_the_ends_are_the_two_models(base, far, groups, found):
    checks = check_transplant(found, base, far, groups, count_was, 3, spec=SPEC)
    assert all(check.ok for check in checks), checks
    assert found.members.shape == (8, 3) and found.rewards.shape == (8, N)
    assert found.gain.abs().max() > 0 and found.kl[0] == 0 and found.kl[-1] > 0
    torch.testing.assert_close(found.shapley().value.sum(), found.gain.double().mean())


def test_shapley_values_are_the_mean_over_all_orders(found):
    total = torch.zeros(3, dtype=torch.float64)
    for order in itertools.permutations(range(3)):
        for k, g in enumerate(order):
            behind, before = found.place(order[: k + 1]), found.place(order[:k])
            total[g] += (found.rewards[behind] - found.rewards[before]).double().mean()
    torch.testing.assert_close(found.shapley().value, total / 6)
    alone = found.rewards[found.place([1])] - found.rewards[found.place([])]
    torch.testing.assert_close(found.put_in().value[1], alone.double().mean())
    lost = found.rewards[found.place([0, 1, 2])] - found.rewards[found.place([0, 2])]
    torch.testing.assert_close(found.taken_out().value[1], lost.double().mean())


def test_what_did_not_change_earns_nothing_at_all(base, far, groups):
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.unembed.W_U.copy_(far.unembed.W_U)
    found = transplant(base, tuned, groups, count_was, N, 3, spec=SPEC)
    for effect in (found.put_in(), found.taken_out(), found.shapley()):
        assert effect.value[:2].tolist() == [0, 0]
        assert effect.value[2] == found.gain.double().mean() != 0


def test_many_groups_are_put_in_along_drawn_orders():
    members, shares, orders = transplant_plan(9, seed=1)
    assert orders.shape == (30, 9, len(members)) and len(members.unique(dim=0)) == len(members)
    assert len(members) < 2**9
    # a game in which each group earns its number, and the first two something more together
    worth = (members.double() @ torch.arange(9.0).double()) + (members[:, 0] & members[:, 1]) * 4.0
    values = shares @ worth
    torch.testing.assert_close(values[2:], torch.arange(2.0, 9.0).double())
    torch.testing.assert_close(values.sum(), torch.tensor(40.0).double())
    # of a pair, each comes first in one of an order and its reverse: 2 for each, without noise
    torch.testing.assert_close(orders @ worth, values.expand(30, 9))
    assert values[:2].tolist() == pytest.approx([2, 3])
    assert torch.equal(transplant_plan(9, seed=1)[0], members)


@pytest.mark.slow
def test_texts_of_the_preset_are_reviews_and_prompts_may_be_of_unequal_length(base, far, groups):
    found = transplant(base, far, groups, true_reward, 4, 1)
    assert found.grammatical[0] == 1.0
    prompts = [[0, 2], [0, 2, 8, 10]]
    mixed = transplant(base, far, groups, count_was, 5, 1, prompts=prompts, spec=SPEC)
    checks = check_transplant(mixed, base, far, groups, count_was, 1, prompts=prompts, spec=SPEC)
    assert all(check.ok for check in checks), checks


def test_nothing_of_the_models_or_the_random_state_is_touched(base, far, groups):
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    state = torch.random.get_rng_state()
    transplant(base, far, groups, count_was, 2, 3, spec=SPEC)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(weight, before[name]) for name, weight in base.state_dict().items())


def test_faulty_calls_are_refused(base, far, groups):
    with pytest.raises(ConfigError, match="n=1"):
        transplant(base, far, groups, count_was, 1, 3)
    with pytest.raises(ConfigError, match="prompts is empty"):
        transplant(base, far, groups, count_was, 2, 3, prompts=())
    half = Groups(groups.names[:1], groups.parts[:1])
    with pytest.raises(ConfigError, match="leave out"):
        transplant(base, far, half, count_was, 2, 3)
    assert len(fine_groups(base)) > 8


@pytest.mark.slow
@pytest.mark.parametrize("fault", TRANSPLANT_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told(base, far, groups, no_type_checks, fault):
    with planted(fault):
        found = transplant(base, far, groups, count_was, 6, 3, spec=SPEC)
        checks = check_transplant(found, base, far, groups, count_was, 3, spec=SPEC)
    assert not all(check.ok for check in checks)
