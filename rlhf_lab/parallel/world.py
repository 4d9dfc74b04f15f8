"""The processes of one run on torch.distributed: what each computes, and what they exchange.

Every pass of a model is split: a rank takes its rows. The results are gathered, so each rank has
the whole batch, and everything else is computed by all ranks on the same numbers. A custom
function therefore works with several processes unchanged.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from rlhf_lab.errors import LabError, LostRankError, RankError, RunError
from rlhf_lab.samples import Samples, Support

if TYPE_CHECKING:
    from rlhf_lab.training.ppo import ObjectiveTerms
    from rlhf_lab.training.recorder import Recorder
    from rlhf_lab.training.trainer import RLHFTrainer

PATIENCE = timedelta(minutes=30)  # a rank may be loading a model or running a probe
Result = TypeVar("Result")


class World:
    """The processes of a run with data parallelism; each has all weights.

    Attributes:
        rank, size: number of this process, from 0, and how many there are.
        is_main: True in the process that logs, saves and runs the callbacks.
        is_apart: True while the main process works alone and the others wait.
        moments: whole moments to save instead of shards; None between the saves of shards.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0
        self.device, self.is_apart = device, False
        self.moments: dict[str, Tensor] | None = {}

    # collectives

    def shards_evenly(self, n_rows: int) -> bool:
        """Return True if a batch is split over the ranks."""
        return not self.is_apart and n_rows % self.size == 0

    def local_slice(self, n_rows: int) -> slice:
        """Return this rank's rows; all rows of a batch that is not split."""
        if not self.shards_evenly(n_rows):
            return slice(0, n_rows)
        each = n_rows // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all ranks, equally many each."""
        if self.is_apart:
            return rows
        local = rows.detach().to(self.device).contiguous()
        received = [torch.empty_like(local) for _ in range(self.size)]
        with self.detect_lost_rank():
            dist.all_gather(received, local)
        return torch.cat(received).to(rows.device)

    def max_over_ranks(self, number: int) -> int:
        return int(self.gather(torch.tensor([number])).max())

    def broadcast(self, value: Any) -> Any:
        """Return the main rank's value, which must be JSON on each."""
        text = json.dumps(value).encode()
        text = text.ljust(self.max_over_ranks(len(text)))
        rows = self.gather(torch.tensor([list(text)], dtype=torch.uint8))
        return json.loads(bytes(rows[0].tolist()))

    @contextlib.contextmanager
    def barrier(self, doing: str) -> Iterator[None]:
        """Wait for all ranks at the end; raise RunError if another rank raised an error."""
        problem = None
        try:
            yield
        except Exception as error:  # reported to the other ranks before it is raised
            problem = error
        failed = self.gather(torch.tensor([problem is not None])).nonzero().flatten()
        if isinstance(problem, LabError) and not self.is_main and not self.is_apart:
            raise RankError(f"process {self.rank}: {problem}") from problem
        if problem is not None:
            raise problem
        if len(failed):
            raise RunError(f"process {int(failed[0])} failed while {doing}; see its error message.")

    @contextlib.contextmanager
    def main_only(self) -> Iterator[None]:
        """Context in which this process works alone, without the others."""
        before, self.is_apart = self.is_apart, True
        try:
            yield
        finally:
            self.is_apart = before

    @contextlib.contextmanager
    def detect_lost_rank(self) -> Iterator[None]:
        """Raise LostRankError if torch.distributed cannot send a message."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise LostRankError(f"process {self.rank} lost another process") from error

    def close(self) -> None:
        """Leave the process group at the end of the program."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # rollout

    def compute_by_rank(
        self, samples: Samples, compute: Callable[[Samples], Result], doing: str
    ) -> Result:
        """Compute tensors with a row per sequence; each rank computes its rows."""
        n_rows = len(samples.tokens)
        if not self.shards_evenly(n_rows):
            return compute(samples)
        rows = self.local_slice(n_rows)
        with self.barrier(doing):
            result = compute(samples.map(lambda x: x[rows]))
        return self._gather_all(result)

    def sample(
        self, sample_rows: Callable[[slice], Samples], n_rows: int, pad_token: int
    ) -> Samples:
        """Sample each rank's rows and return the whole batch, padded to the longest prompt."""
        with self.barrier("sampling"):
            samples = sample_rows(self.local_slice(n_rows))
        if not self.shards_evenly(n_rows):
            return samples
        gap = self.max_over_ranks(samples.prefix_len) - samples.prefix_len
        tokens = pad(samples.tokens, (gap, 0), value=pad_token)
        support = samples.support
        if support is not None:
            width = self.max_over_ranks(support.tokens.shape[-1]) - support.tokens.shape[-1]
            support = Support(pad(support.tokens, (0, width)), pad(support.kept, (0, width)))
        changes = {"prompt_mask": pad(samples.prompt_mask, (gap, 0)), "support": support}
        return self._gather_all(dataclasses.replace(samples, tokens=tokens, **changes))

    def _gather_all(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.gather(value)
        if dataclasses.is_dataclass(value):
            return type(value)(**self._gather_all(vars(value)))
        if isinstance(value, Mapping):
            return {name: self._gather_all(each) for name, each in value.items()}
        if isinstance(value, tuple):  # a NamedTuple
            return value._make(self._gather_all(each) for each in value)
        return value

    # learning; `sharding.ShardedWorld` overrides these methods

    def open(self) -> None:
        """Gather the weights after the optimizer is made."""

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Context of a learning phase."""
        yield

    def wrap_forward(self, compute_part: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward pass of a part of a minibatch."""
        return compute_part

    def sum_terms(self, terms: "ObjectiveTerms") -> "ObjectiveTerms":
        """Return the terms of the whole minibatch from those of this rank's rows."""
        sums = {name: x for name, x in vars(terms).items() if not x.ndim}
        rows = {name: self.gather(x) for name, x in vars(terms).items() if x.ndim}
        total = self.gather(torch.stack(list(sums.values()))[None]).sum(0)  # one message for all
        return dataclasses.replace(terms, **rows, **dict(zip(sums, total, strict=True)))

    def sum_gradients(self, policy: nn.Module) -> None:
        """Replace each gradient by the sum over ranks, whose terms are fractions already."""
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        if self.is_apart:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with self.detect_lost_rank():
            dist.all_reduce(flat)
        for x, total in zip(gradients, flat.split([x.numel() for x in gradients]), strict=True):
            x.copy_(total.view_as(x))

    def open_run(self, recorder: "Recorder") -> str:
        """Create the run's directory in the main process; return its path in all."""
        with self.barrier("opening the run's directory"):
            if self.is_main:
                recorder.open()
        return self.broadcast(str(recorder.run.path) if self.is_main else None)

    def emit(self, trainer: "RLHFTrainer", event: Any, phase: int | None, **fields: Any) -> None:
        """Call the callbacks of an event in the main process."""
        if self.is_main:
            with self.main_only():
                trainer.emit(event, phase, **fields)

    def shard_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's part of a saved state of the optimizer."""
        return state


def connect(trainer: "RLHFTrainer", optimizer: Any) -> World:
    """Connect to the other processes; shard the policy with `parallel='fsdp'`."""
    from rlhf_lab.parallel import sharding, validation

    if trainer.device.type == "cuda":
        torch.cuda.set_device(trainer.device.index or 0)
    if not dist.is_initialized():
        backend = "nccl" if trainer.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    world = World(trainer.device)
    validation.validate_equal(world, trainer)
    if trainer.args.parallel != "fsdp":
        return world
    validation.validate_shardable(trainer.policy, trainer.reference, optimizer)
    return sharding.ShardedWorld(trainer)
