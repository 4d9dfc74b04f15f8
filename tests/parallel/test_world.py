"""Ranks: their rows and messages, computed by hand, and validation of their settings."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RankError
from rlhf_lab.models import make_reference
from rlhf_lab.parallel import validation
from rlhf_lab.parallel.launcher import n_processes, process_rank
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training.components import choose_device
from tests.training.recorded_runs import IN_BACKWARD

FOUR = {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "3"}


def test_launcher_reads_variables_of_torchrun(monkeypatch):
    """Other programs may leave some of them set."""
    ranks = {"RANK": "1", "LOCAL_RANK": "1"}
    left_over = [{}, ranks, *(FOUR | {"WORLD_SIZE": size} for size in ("0", "1", "many"))]
    for environment, n, local in ((FOUR, 4, 1), *((each, 1, 0) for each in left_over)):
        monkeypatch.setattr("os.environ", environment)
        assert (n_processes(), process_rank("LOCAL_RANK")) == (n, local)
        assert (process_rank() == 0) == (n == 1)


CODE = """
import signal
from torch import nn
from rlhf_lab.errors import ConfigError, LabError, LostRankError
from rlhf_lab.parallel.world import World
torch.distributed.init_process_group("gloo")
world = World(torch.device("cpu"))
module = nn.ParameterList([torch.ones(1), torch.ones(2, 2, dtype=torch.float64), torch.ones(3)])
module[0].grad = torch.tensor([2.0**rank])
module[1].grad = torch.full((2, 2), rank, dtype=torch.float64)
world.sum_gradients(module)
values = dict(
    rows=world.gather(torch.tensor([rank, -rank])).tolist(),
    flags=world.gather(torch.tensor([rank == 1])).tolist(),
    gradients=[p.grad if p.grad is None else p.grad.tolist() for p in module],
    rows_of_9=[world.local_slice(9).start, world.local_slice(9).stop],
    is_even=world.shards_evenly(8),
    largest=world.max_over_ranks(10 + rank),
    from_main=world.broadcast({"rank": 10**rank, "ü": None}),
)
with world.main_only():
    with world.main_only():
        pass
    values["apart"] = [world.gather(torch.tensor([rank])).item(), world.max_over_ranks(rank)]
    values["apart"] += [world.local_slice(9).stop, world.broadcast(rank)]
try:
    with world.barrier("scoring its samples"):
        if rank != 0:
            raise ConfigError("The reward is nan. Return numbers.")
except LabError as error:
    values["error"] = [type(error).__name__, str(error)]
try:
    with world.barrier("saving"):
        if world.is_main:
            raise ConfigError("The disk is full.")
except LabError as error:
    values["error_of_main"] = type(error).__name__
report(**values)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    world.gather(torch.ones(9))
except LostRankError as error:
    report(**values, lost=str(error))
    os._exit(3)
"""


@pytest.mark.process
def test_messages_match_hand_computed(launch, tmp_path):
    """Rank r has rows (r, -r), gradients 2^r and r; 1 and 2 fail, then 0; 2 is killed."""
    ended = launch(tmp_path, 3, CODE)
    assert [rank.status for rank in ended] == [3, 3, -9], ended[0].error
    for rank, (_, values, _) in enumerate(ended):
        assert values["rows"] == [0, 0, 1, -1, 2, -2]
        assert values["flags"] == [False, True, False]
        assert values["gradients"] == [[7.0], [[3.0, 3.0], [3.0, 3.0]], None]
        assert values["rows_of_9"] == [3 * rank, 3 * rank + 3] and not values["is_even"]
        assert values["largest"] == 12 and values["from_main"] == {"rank": 1, "ü": None}
        assert values["apart"] == [rank, rank, 9, rank]
        failed = ["RunError", "process 1 failed while scoring its samples; see its error message."]
        raised = ["RankError", f"process {rank}: The reward is nan. Return numbers."]
        assert values["error"] == (raised if rank else failed)
        assert values["error_of_main"] == ("RunError" if rank else "ConfigError")
        if rank != 2:
            assert values["lost"] == f"process {rank} lost another process"


@pytest.mark.parametrize(
    ("parallel", "settings", "message"),
    [
        ("ddp", {"batch_size": 30}, "batch_size=30 and its minibatches of 15 sequences must be"),
        ("ddp", {"num_minibatches": 16}, "of 2 sequences must be divisible by 4"),
        ("ddp", IN_BACKWARD, "Set optimizer_in_backward=False"),
        ("fsdp", {"weight_precision": "bf16"}, "weight_precision='bf16' cannot be combined with"),
        ("fsdp", {"precision": "bf16"}, "Set activation_checkpointing=True"),
    ],
)
def test_settings_for_one_process_are_rejected(parallel, settings, message):
    settings = {"preset": "reel", "batch_size": 32, "num_minibatches": 2} | settings
    with pytest.raises(ConfigError, match=message):
        validation.validate_process_settings(RLHFArgs(**settings, parallel=parallel), 4)
    if parallel == "fsdp":
        validation.validate_process_settings(RLHFArgs(**settings), 4)


def test_components_that_cannot_be_sharded_are_rejected():
    policy = load_policy_and_critic(RLHFArgs(preset="reel"), torch.device("cpu"))
    reference = make_reference(policy.base_model)
    validation.validate_shardable(policy, reference, None)
    with pytest.raises(ConfigError, match="does not shard a custom optimizer"):
        validation.validate_shardable(policy, reference, torch.optim.SGD(policy.parameters()))
    with pytest.raises(ConfigError, match="does not shard trained weights of the reference"):
        validation.validate_shardable(policy, policy.base_model, None)
    policy.forward = lambda *inputs: None
    with pytest.raises(ConfigError, match="the custom forward of TransformerWithValueHead"):
        validation.validate_shardable(policy, reference, None)


def test_device_of_rank_is_its_own_gpu(monkeypatch):
    variables = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rejected = {"mps": "works in one process only", "cuda:0": "names one device for 4 processes"}
    with pytest.raises(ConfigError, match="WORLD_SIZE=4 is set, and RANK, MASTER_ADDR or"):
        validation.device_of_rank(torch.device("cpu"), "auto")
    monkeypatch.setenv("MASTER_PORT", "1")
    for name, message in rejected.items():
        with pytest.raises(ConfigError, match=message):
            validation.device_of_rank(torch.device(name), name)
    assert validation.device_of_rank(torch.device("cuda"), "auto") == torch.device("cuda:3")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(RankError, match="RANK=5 must be below WORLD_SIZE=4"):  # torch would wait
        choose_device(RLHFArgs(preset="reel"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert validation.device_of_rank(torch.device("cuda:1"), "cuda:1") == torch.device("cuda:1")
