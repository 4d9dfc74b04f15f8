"""Ranks: what they share, counted by hand, and how the failure of one ends the others."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.parallel.launcher import is_main_process, local_rank, n_processes
from rlhf_lab.parallel.validation import device_of_rank, validate_process_settings

MEET = """
from rlhf_lab.parallel.world import World, join_group
join_group(torch.device("cpu"))
world = World(torch.device("cpu"))
"""


def test_the_environment_of_torchrun_is_read():
    assert (n_processes({}), local_rank({}), is_main_process({})) == (1, 0, True)
    found = {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "3"}
    assert (n_processes(found), local_rank(found), is_main_process(found)) == (4, 1, False)


@pytest.mark.parametrize("size", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "many"}])
def test_ranks_without_other_processes_are_ignored(size):
    """RANK=1 left over from another program would silence this one."""
    left_over = {"RANK": "1", "LOCAL_RANK": "1"} | size
    assert n_processes(left_over) == 1
    assert local_rank(left_over) == 0 and is_main_process(left_over)


@pytest.mark.process
@pytest.mark.parametrize("n", [2, 4])
def test_rows_numbers_and_words_are_shared(ranks, n):
    """Rank r has rows (r, -r) and the number 2^r: rows in order, the sum is 2^n - 1."""
    code = """
r = torch.tensor([float(rank), -float(rank)])
parts = [torch.tensor([2.0**rank]), torch.full((2, 2), rank, dtype=torch.float64)]
rows, flags = world.gather(r), world.gather(torch.tensor([rank == 1]))
world.all_reduce_(parts)
with world.main_only():
    alone = [world.gather(r).tolist(), world.local_slice(8) == slice(0, 8)]
    alone.append(world.max_over_ranks(rank))
rows_of_8, value = world.local_slice(8), {"rank": rank, "ü": None}
tell(rows=rows.tolist(), flags=flags.tolist(), sums=[x.tolist() for x in parts], alone=alone,
     share=[rows_of_8.start, rows_of_8.stop], odd=world.shards_evenly(7),
     widest=world.max_over_ranks(10 + rank), said=world.broadcast(value),
     any=[world.any_rank(rank == 1), world.any_rank(False)])
world.close()
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


@pytest.mark.process
def test_an_error_of_one_process_ends_all_with_one_sentence_each(ranks):
    code = """
from rlhf_lab.errors import ConfigError, LabError
try:
    with world.barrier("scoring its samples"):
        if rank == 1:
            raise ConfigError("the reward is nan; return numbers.")
except LabError as error:
    tell(kind=type(error).__name__, said=str(error))
"""
    first, second = ranks(2, MEET + code)
    why = "process 1 failed while scoring its samples; see its error message."
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
world.any_rank(False)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    world.all_reduce_([torch.ones(9)])
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
        ({"batch_size": 30}, "batch_size=30 and"),
        (
            {"batch_size": 32, "num_minibatches": 16},
            "of 2 sequences must be divisible by 4",
        ),
        (
            {"batch_size": 48, "num_minibatches": 2, "micro_batch_size": 4},
            "micro_batch_size=4 must divide the 6 sequences",
        ),
        (
            {"batch_size": 32, "optimizer_in_backward": True, "max_grad_norm": None},
            "Set optimizer_in_backward=False",
        ),
    ],
)
def test_settings_that_cannot_be_dealt_are_refused(settings, said):
    from rlhf_lab.config import RLHFArgs

    args = RLHFArgs(preset="reel", **({"num_minibatches": 2} | settings))
    validate_process_settings(args, 1) if "optimizer_in_backward" not in settings else None
    with pytest.raises(ConfigError, match=said):
        validate_process_settings(args, 4)


def test_devices_that_are_not_one_per_process_are_refused(monkeypatch):
    ranks = {"RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in ({"WORLD_SIZE": "4"} | ranks | address).items():
        monkeypatch.setenv(name, value)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert device_of_rank(cpu, "auto") == cpu
    with pytest.raises(ConfigError, match="device='mps' works in one process only"):
        device_of_rank(torch.device("mps"), "mps")
    with pytest.raises(ConfigError, match="device='cuda:0' names one device for 4 processes"):
        device_of_rank(torch.device("cuda:0"), "cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="has 2 GPUs"):
        device_of_rank(cuda, "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_of_rank(cuda, "auto") == torch.device("cuda:3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert device_of_rank(torch.device("cuda:1"), "cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="device='mps' works in one process only"):
        device_of_rank(torch.device("mps"), "mps")
