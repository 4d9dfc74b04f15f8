"""Replay memory: minibatches of a rollout whose tensors contain the number of their row."""

import pytest
import torch

from rlhf_lab.sampling import Samples, Support
from rlhf_lab.training import ReplayMemory, ReplayMinibatch, Rollout
from tests.training.recorded_runs import make_rollout

BATCH, PREFIX, GEN, D_MODEL, WIDTH = 12, 2, 3, 4, 2


def tagged(*shape: int) -> torch.Tensor:
    """Entry [i, ...] is i, the number of its sequence."""
    return torch.arange(BATCH).reshape(-1, *(1 for _ in shape)).expand(BATCH, *shape).clone()


def rollout_of_rows(with_support: bool = True) -> Rollout:
    """Return a rollout: row i of a tensor is i plus an offset; masks differ in odd rows."""
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
    return make_rollout(
        samples,
        ref_residuals=tagged(GEN, D_MODEL) + 500.0,
        advantages=tagged(GEN) + 300.0,
        returns=tagged(GEN) + 400.0,
    )


def split(seed: int, num_minibatches: int = 3, passes: int = 4) -> list[ReplayMinibatch]:
    memory = ReplayMemory(rollout_of_rows(), num_minibatches, passes)
    return list(memory.get_minibatches(torch.Generator().manual_seed(seed)))


def orders(minibatches: list[ReplayMinibatch], per_pass: int = 3) -> list[tuple[int, ...]]:
    """Return the order of the sequences in each pass."""
    flat = [minibatch.tokens[:, 0].tolist() for minibatch in minibatches]
    return [tuple(sum(flat[i : i + per_pass], [])) for i in range(0, len(flat), per_pass)]


@pytest.mark.parametrize(("num_minibatches", "passes"), [(1, 1), (3, 2), (12, 3)])
def test_every_pass_has_every_sequence_once(num_minibatches, passes):
    minibatches = split(0, num_minibatches, passes)
    sizes = [len(minibatch.tokens) for minibatch in minibatches]
    assert sizes == [BATCH // num_minibatches] * (num_minibatches * passes)
    for order in orders(minibatches, num_minibatches):
        assert sorted(order) == list(range(BATCH))


def test_order_depends_on_generator_and_pass_only():
    torch.manual_seed(0)
    first = orders(split(7))
    torch.manual_seed(1)
    assert orders(split(7)) == first != orders(split(8))
    assert len({*first, tuple(range(BATCH))}) == 5


def test_every_tensor_of_a_minibatch_has_the_same_rows():
    offsets = {"tokens": 0, "logprobs": 100, "values": 200, "advantages": 300, "returns": 400}
    for minibatch in split(3):
        rows = minibatch.tokens[:, 0]
        odd = rows % 2 == 1
        for name, offset in (offsets | {"ref_residuals": 500}).items():
            found = getattr(minibatch, name).flatten(1)
            assert torch.equal(found, (rows + offset)[:, None].expand_as(found)), name
        assert torch.equal(~minibatch.mask[:, -1], odd)
        assert torch.equal(~minibatch.attention_mask[:, 0], odd)
        assert minibatch.attention_mask[:, 1:].all() and minibatch.prefix_len == PREFIX
        assert torch.equal(minibatch.support.tokens[:, 0, 0], rows + 1000)
        assert torch.equal(~minibatch.support.kept[:, 0, 1], odd)
    memory = ReplayMemory(rollout_of_rows(with_support=False), 3, 1)
    assert all(m.support is None for m in memory.get_minibatches(torch.Generator()))
