"""Dealing out a rollout whose rows carry tags that can be followed through every tensor."""

import pytest
import torch

from rlhf_lab.sampling import Samples, Support
from rlhf_lab.training import ReplayMemory, ReplayMinibatch, Rollout

BATCH, PREFIX, GEN, D_MODEL, WIDTH = 12, 2, 3, 4, 2


def tagged(*shape: int) -> torch.Tensor:
    """Entry [i, ...] is i, the number of its sequence."""
    return torch.arange(BATCH).reshape(-1, *(1 for _ in shape)).expand(BATCH, *shape).clone()


def make_rollout(with_support: bool = True) -> Rollout:
    """Rows hold i plus an offset of the tensor's own; masks tell odd from even rows."""
    odd = torch.arange(BATCH) % 2 == 1
    mask = torch.ones(BATCH, GEN, dtype=torch.bool)
    mask[odd, -1] = False
    prompt_mask = torch.ones(BATCH, PREFIX, dtype=torch.bool)
    prompt_mask[odd, 0] = False
    kept = torch.ones(BATCH, GEN, WIDTH, dtype=torch.bool)
    kept[odd, :, 1] = False
    samples = Samples(
        tokens=tagged(PREFIX + GEN),
        prompt_mask=prompt_mask,
        mask=mask,
        logprobs=tagged(GEN) + 100.0,
        values=tagged(GEN) + 200.0,
        support=Support(tagged(GEN, WIDTH) + 1000, kept) if with_support else None,
    )
    return Rollout(
        samples=samples,
        texts=[str(i) for i in range(BATCH)],
        raw_rewards=torch.arange(BATCH) + 0.0,
        rewards=torch.arange(BATCH) + 0.0,
        true_rewards=None,
        grammatical=None,
        kl=torch.zeros(BATCH, GEN),
        entropy=torch.zeros(BATCH, GEN),
        ref_residuals=tagged(GEN, D_MODEL) + 500.0,
        advantages=tagged(GEN) + 300.0,
        returns=tagged(GEN) + 400.0,
    )


def rows_of(minibatch: ReplayMinibatch) -> list[int]:
    return minibatch.tokens[:, 0].tolist()


def deal(seed: int, num_minibatches: int = 3, passes: int = 4) -> list[ReplayMinibatch]:
    memory = ReplayMemory(make_rollout(), num_minibatches, passes)
    return list(memory.get_minibatches(torch.Generator().manual_seed(seed)))


def orders(minibatches: list[ReplayMinibatch], per_pass: int) -> list[list[int]]:
    """The order of the sequences in each pass."""
    flat = [rows_of(minibatch) for minibatch in minibatches]
    return [sum(flat[i : i + per_pass], []) for i in range(0, len(flat), per_pass)]


@pytest.mark.parametrize(("num_minibatches", "passes"), [(1, 1), (3, 2), (12, 3)])
def test_every_pass_deals_every_sequence_exactly_once(num_minibatches, passes):
    minibatches = deal(0, num_minibatches, passes)
    assert [len(rows_of(m)) for m in minibatches] == [BATCH // num_minibatches] * (
        num_minibatches * passes
    )
    for order in orders(minibatches, num_minibatches):
        assert sorted(order) == list(range(BATCH))


def test_each_pass_has_a_fresh_order():
    passes = orders(deal(0), 3)
    assert len({tuple(order) for order in passes}) == 4
    assert list(range(BATCH)) not in passes


def test_the_generator_decides_the_order():
    assert orders(deal(7), 3) == orders(deal(7), 3)
    assert orders(deal(7), 3) != orders(deal(8), 3)


def test_the_order_owes_nothing_to_the_global_random_state():
    torch.manual_seed(0)
    first = orders(deal(7), 3)
    torch.manual_seed(1)
    assert orders(deal(7), 3) == first


def test_every_tensor_of_a_minibatch_has_the_same_rows():
    for minibatch in deal(3):
        rows = torch.tensor(rows_of(minibatch))
        odd = rows % 2 == 1
        for name, offset in {
            "tokens": 0,
            "logprobs": 100,
            "values": 200,
            "advantages": 300,
            "returns": 400,
            "ref_residuals": 500,
        }.items():
            found = getattr(minibatch, name).flatten(1)
            assert torch.equal(found, (rows + offset)[:, None].expand_as(found)), name
        assert torch.equal(~minibatch.mask[:, -1], odd)
        assert torch.equal(~minibatch.attention_mask[:, 0], odd)
        assert minibatch.attention_mask[:, 1:].all()
        assert minibatch.attention_mask.shape == (4, PREFIX + GEN)
        assert torch.equal(minibatch.support.tokens[:, 0, 0], rows + 1000)
        assert torch.equal(~minibatch.support.kept[:, 0, 1], odd)


def test_prefix_len_is_what_the_response_leaves_of_the_sequence():
    assert {minibatch.prefix_len for minibatch in deal(0)} == {PREFIX}


def test_without_truncation_there_is_no_support():
    memory = ReplayMemory(make_rollout(with_support=False), 3, 1)
    assert all(m.support is None for m in memory.get_minibatches(torch.Generator()))


def test_dealing_leaves_the_rollout_as_it_was():
    rollout, untouched = make_rollout(), make_rollout()
    list(ReplayMemory(rollout, 3, 2).get_minibatches(torch.Generator()))
    assert torch.equal(rollout.samples.tokens, untouched.samples.tokens)
    assert torch.equal(rollout.advantages, untouched.advantages)
