"""Ranks: the processes of one run under torchrun, what each does of a batch, and what they share.

Whatever a model has to be run on is dealt: a rank takes its rows. What comes out is gathered, so
that each rank has the whole batch, and all that is no forward pass is done by every rank alike, on
the same numbers. So a function of a learner's own is right on several ranks without knowing of it.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from rlhf_lab.errors import ConfigError, LabError, LostRankError, RankError, RunError
from rlhf_lab.launcher import is_grouped, launched, local_rank, processes_per_node

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, one of which may be loading a model, or running a probe."""
STORE_PATIENCE = timedelta(seconds=5)
"""How long the store is waited for when a process is gone, which may have held it."""


class World:
    """The processes of one run; here the only one, for which every call changes nothing.

    Attributes:
        rank: the number of this process, from 0; the first writes the run's directory.
        size: how many there are.
        bytes_sent: what this process has sent so far, by purpose; 0 where it is alone.
    """

    rank, size = 0, 1
    has_group = False
    """Whether it has a process group: always with others, and alone where weights are sharded."""
    is_apart = False
    """Whether this process does all by itself now, while the others wait for it."""

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that logs, saves and calls the listeners."""
        return self.rank == 0

    def share(self, n_rows: int) -> slice:
        """The rows of a batch that this rank deals with; all of one that does not divide."""
        return slice(0, n_rows)

    def deals(self, n_rows: int) -> bool:
        """Whether a batch of so many rows is dealt to several ranks."""
        return False

    def gather(self, rows: Shaped[Tensor, " *dims"], purpose: str = "rows") -> Tensor:
        """The rows of all ranks, in order."""
        return rows

    def widest(self, width: int) -> int:
        """The largest of the ranks' numbers."""
        return width

    def add_up(self, tensors: Sequence[Tensor], purpose: str = "numbers") -> None:
        """Put the sum over ranks in the place of each tensor, in one message for all."""

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; all then do the same."""
        return flag

    def of_main(self, said: Any) -> Any:
        """What the main rank says, as far as JSON can hold it; the others' own is left aside."""
        return said

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Let an error that one rank meets end all of them, and none wait for what will not come.

        Nothing within may talk to other ranks.

        Raises:
            RunError: another rank failed; that one raises its own error.
        """
        yield

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within, this process does all by itself, as one that is alone: listeners live here."""
        yield

    def break_off(self, error: BaseException) -> None:
        """Note that an error ends this process, which the others will miss."""

    def leave(self) -> None:
        """Say goodbye to the others at the end of the program."""


class Ranks(World):
    """Several processes on `torch.distributed`, started by torchrun.

    Args:
        device: of the tensors that are sent: CUDA with nccl, the CPU with gloo.
        store: where the processes met, and leave word for each other.
    """

    has_group = True

    def __init__(self, device: torch.device, store: dist.Store | None = None) -> None:
        super().__init__()
        self.store = store
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def deals(self, n_rows: int) -> bool:
        """See `World`; nothing is dealt while this rank is apart."""
        return not self.is_apart and n_rows % self.size == 0

    def share(self, n_rows: int) -> slice:
        """See `World`."""
        if not self.deals(n_rows):
            return slice(0, n_rows)
        each = n_rows // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather(self, rows: Shaped[Tensor, " *dims"], purpose: str = "rows") -> Tensor:
        """See `World`; each rank gives equally many rows, all of one width."""
        if self.is_apart:
            return rows
        own = rows.detach().to(self.device).contiguous()
        sent = own.to(torch.uint8) if own.dtype == torch.bool else own
        every = [torch.empty_like(sent) for _ in range(self.size)]
        self.bytes_sent[purpose] += sent.nbytes * (self.size - 1)
        with self.meeting():
            dist.all_gather(every, sent)
        return torch.cat(every).to(rows.device, rows.dtype)

    def widest(self, width: int) -> int:
        """See `World`."""
        if self.is_apart:
            return width
        found = torch.tensor(width, device=self.device)
        with self.meeting():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def add_up(self, tensors: Sequence[Tensor], purpose: str = "numbers") -> None:
        """See `World`; tensors of one dtype go as one, on whatever device they are."""
        if self.is_apart:
            return
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            of_dtype = [x for x in tensors if x.dtype == dtype]
            flat = torch.cat([x.detach().reshape(-1) for x in of_dtype]).to(self.device)
            # a ring sends each part on to the next rank, once to add it up and once to tell the sum
            self.bytes_sent[purpose] += math.ceil(2 * flat.nbytes * (self.size - 1) / self.size)
            with self.meeting():
                dist.all_reduce(flat)
            for x, part in zip(of_dtype, flat.split([x.numel() for x in of_dtype]), strict=True):
                x.detach().copy_(part.view_as(x))

    def any(self, flag: bool) -> bool:
        """See `World`."""
        return bool(self.widest(int(flag)))

    def of_main(self, said: Any) -> Any:
        """See `World`."""
        if self.is_apart:
            return said
        letter = json.dumps(said).encode() if self.is_main else b""
        sent = torch.zeros(self.widest(len(letter)), dtype=torch.uint8)
        sent[: len(letter)] = torch.tensor(list(letter), dtype=torch.uint8)
        sent = sent.to(self.device)
        with self.meeting():
            dist.broadcast(sent, src=0)
        return json.loads(bytes(sent.tolist()))

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """See `World`."""
        if self.is_apart:
            yield
            return
        problem = None
        try:
            yield
        except Exception as error:  # whatever it is, the others are told first
            problem = error
        lost = self.gather(torch.tensor([problem is not None]), "numbers").nonzero().flatten()
        if isinstance(problem, LabError) and not self.is_main:
            raise RankError(f"process {self.rank}: {problem}") from problem
        if problem is not None:
            raise problem
        if len(lost):
            raise RunError(
                f"process {int(lost[0])} failed while {doing}; its own message says why."
            )

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """See `World`."""
        before, self.is_apart = self.is_apart, True
        try:
            yield
        finally:
            self.is_apart = before

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Say of a message that cannot be sent that a process is gone."""
        try:
            yield
        except RuntimeError as error:  # of gloo and nccl, whose kinds differ
            said = f"process {self.rank} lost another process"
            raise LostRankError(said, self._is_first_to_notice()) from error

    def _is_first_to_notice(self) -> bool:
        """Whether none of the other processes has said that one of them is lost.

        A store that is not there was kept by the main process: the next one speaks in its place,
        and the first of each other machine, which has a log of its own.
        """
        if self.store is None:
            return self.is_main
        try:
            self.store.set_timeout(STORE_PATIENCE)
            return self.store.add("lost", 1) == 1
        except RuntimeError:
            return self.rank == 1 or local_rank() == 0

    def break_off(self, error: BaseException) -> None:
        """See `World`; what has a sentence of its own is told by it, and the others are silent."""
        if isinstance(error, LabError) and not isinstance(error, LostRankError):
            self._is_first_to_notice()

    def leave(self) -> None:
        """See `World`."""
        if dist.is_initialized():
            dist.destroy_process_group()


def device_of_rank(device: torch.device, asked: str, parallel: str = "auto") -> torch.device:
    """The device of this process: each has a GPU of its own.

    Args:
        asked: the setting that `device` was picked by.
        parallel: the setting `RLHFArgs.parallel`.

    Raises:
        ConfigError: one GPU is named for several processes, there are too few, or it is MPS.
    """
    if not is_grouped(parallel):
        return device
    if device.type == "mps" or not dist.is_available():
        raise ConfigError(
            f"device={asked!r} works in one process only; set it to cpu, or start the run without "
            "torchrun."
        )
    if device.type != "cuda" or launched() == 1:
        return device
    if torch.device(asked if asked != "auto" else "cuda").index is not None:
        raise ConfigError(
            f"device={asked!r} names one device for {launched()} processes; set it to auto."
        )
    there = torch.cuda.device_count()
    if processes_per_node() > there:  # which each of them meets, so that the first can say it
        raise ConfigError(
            f"{processes_per_node()} processes on this machine have no GPU each: there are "
            f"{there}; start at most {there} (--nproc-per-node {there})."
        )
    return torch.device("cuda", local_rank())


def join(device: torch.device, parallel: str = "auto") -> World:
    """Meet the other processes that torchrun started; a `World` of one without torchrun.

    Args:
        parallel: the setting `RLHFArgs.parallel`: a process that shards weights needs a group, even
            where torchrun started no other.
    """
    if not is_grouped(parallel):
        return World()
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    if dist.is_initialized():
        return Ranks(device)
    store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return Ranks(device, store)
