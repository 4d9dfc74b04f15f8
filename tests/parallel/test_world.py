"""Ranks: what they share, counted by hand, and how the failure of one ends the others."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.launcher import is_main_process, launched, local_rank
from rlhf_lab.parallel import World, device_of_rank
from rlhf_lab.training.ranks import refuse_undealt

MEET = """
from rlhf_lab.parallel import join
world = join(torch.device("cpu"))
"""


def test_a_process_alone_changes_nothing():
    world, x = World(), torch.arange(6.0)
    assert world.is_main and world.size == 1
    assert world.gather(x) is x
    world.add_up([x])
    assert torch.equal(x, torch.arange(6.0))
    assert world.share(6) == slice(0, 6) and not world.deals(6)
    assert world.widest(7) == 7 and world.any(True) and not world.any(False)
    assert world.of_main({"a": 1}) == {"a": 1}
    with world.together("nothing"), world.apart():
        pass
    assert not torch.distributed.is_initialized() and not world.bytes_sent


def test_the_environment_of_torchrun_is_read():
    assert (launched({}), local_rank({}), is_main_process({})) == (1, 0, True)
    found = {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "3"}
    assert (launched(found), local_rank(found), is_main_process(found)) == (4, 1, False)


@pytest.mark.process
@pytest.mark.parametrize("n", [2, 4])
def test_rows_numbers_and_words_are_shared(ranks, n):
    """Rank r has rows (r, -r) and the number 2^r: rows in order, the sum is 2^n - 1."""
    code = """
r = torch.tensor([float(rank), -float(rank)])
parts = [torch.tensor([2.0**rank]), torch.full((2, 2), rank, dtype=torch.float64)]
rows, flags = world.gather(r), world.gather(torch.tensor([rank == 1]))
world.add_up(parts)
with world.apart():
    alone = [world.gather(r).tolist(), world.share(8) == slice(0, 8), world.widest(rank)]
share = world.share(8)
tell(rows=rows.tolist(), flags=flags.tolist(), sums=[x.tolist() for x in parts], alone=alone,
     share=[share.start, share.stop], odd=world.deals(7), widest=world.widest(10 + rank),
     any=[world.any(rank == 1), world.any(False)], said=world.of_main({"rank": rank, "ü": None}),
     sent=dict(world.bytes_sent))
world.leave()
"""
    for rank, (status, told, error) in enumerate(ranks(n, MEET + code)):
        assert status == 0, error
        assert told["rows"] == [x for r in range(n) for x in (r, -r)]
        assert told["flags"] == [r == 1 for r in range(n)]
        assert told["sums"] == [[2**n - 1], [[n * (n - 1) / 2] * 2] * 2]
        assert told["alone"] == [[rank, -rank], True, rank]
        assert told["share"] == [rank * 8 // n, (rank + 1) * 8 // n] and told["odd"] is False
        assert told["widest"] == 10 + n - 1 and told["any"] == [True, False]
        assert told["said"] == {"rank": 0, "ü": None}
        # rows: 8 bytes and a flag to each other rank; sums: 4 and 32 bytes, twice (n - 1) / n
        sums = sum(-(-2 * size * (n - 1) // n) for size in (4, 32))
        assert told["sent"] == {"rows": 9 * (n - 1), "numbers": sums}


@pytest.mark.process
def test_an_error_of_one_process_ends_all_with_one_sentence_each(ranks):
    code = """
from rlhf_lab.errors import ConfigError, LabError
try:
    with world.together("scoring its samples"):
        if rank == 1:
            raise ConfigError("the reward is nan; return numbers.")
except LabError as error:
    tell(kind=type(error).__name__, said=str(error))
"""
    first, second = ranks(2, MEET + code)
    why = "process 1 failed while scoring its samples; its own message says why."
    assert first.told == {"kind": "RunError", "said": why}
    assert second.told == {
        "kind": "RankError",
        "said": "process 1: the reward is nan; return numbers.",
    }


@pytest.mark.process
def test_a_process_that_is_gone_is_told_of_at_the_next_message(ranks):
    code = """
import signal
from rlhf_lab.errors import LostRankError
world.any(False)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    world.add_up([torch.ones(9)])
except LostRankError as error:
    tell(said=str(error))
    os._exit(3)
"""
    first, second = ranks(2, MEET + code)
    assert (first.status, second.status) == (3, -9)
    assert first.told == {"said": "process 0 lost another process"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 30}, "batch_size=30 cannot be dealt to 4 processes"),
        ({"batch_size": 32, "num_minibatches": 16}, "= 2 sequences cannot be dealt to 4"),
        (
            {"batch_size": 48, "num_minibatches": 2, "micro_batch_size": 4},
            "micro_batch_size=4 does not divide the 6 sequences",
        ),
        (
            {"batch_size": 32, "optimizer_in_backward": True, "max_grad_norm": None},
            "leave it False",
        ),
    ],
)
def test_settings_that_cannot_be_dealt_are_refused(settings, said):
    from rlhf_lab.config import RLHFArgs

    args = RLHFArgs(preset="reel", **({"num_minibatches": 2} | settings))
    refuse_undealt(args, 1, True)
    with pytest.raises(ConfigError, match=said):
        refuse_undealt(args, 4, True)


def test_devices_that_are_not_one_per_process_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert device_of_rank(cpu, "auto") == cpu
    with pytest.raises(ConfigError, match="device='mps' works in one process only"):
        device_of_rank(torch.device("mps"), "mps")
    with pytest.raises(ConfigError, match="device='cuda:0' names one device for 4 processes"):
        device_of_rank(torch.device("cuda:0"), "cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="start at most 2"):
        device_of_rank(cuda, "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_of_rank(cuda, "auto") == torch.device("cuda:3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert device_of_rank(torch.device("cuda:1"), "cuda:1", "fsdp") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="device='mps' works in one process only"):
        device_of_rank(torch.device("mps"), "mps", "fsdp")
