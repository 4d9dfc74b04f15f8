"""Sharded weights: FSDP2 (`fully_shard`) on what learns, so that each process holds its part.

Shards are kept of weights, gradients and moments. In a learning phase each block's weights are
gathered for its forward pass, and again for its backward pass, where its gradient is summed and cut
up at once. Between learning phases they are whole on every process: sampling reads all of them for
every token, and the listeners on the main process look at them without the others.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlhf_lab.errors import ConfigError
from rlhf_lab.launcher import processes_per_node
from rlhf_lab.models import Forward
from rlhf_lab.models.hooked_model import named_blocks
from rlhf_lab.parallel import Ranks
from rlhf_lab.training.callbacks import Event
from rlhf_lab.training.checkpoint import load_optimizer, optimizer_tensors
from rlhf_lab.training.whole_weights import WholeWeights

STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
"""Where FSDP2 hangs functions on the policy's own modules that cut its weights up again."""


class Unit(nn.Module):
    """Modules whose weights travel together, and within which a function of theirs is run.

    FSDP2 changes the class of what it is given and hangs hooks on it. That is this module and not a
    part of the policy, whose hooks, types and copies stay as they are.

    Args:
        parts: the modules; the policy's own.
        units: other units that are run within this one.
    """

    def __init__(self, parts: Sequence[nn.Module], units: Sequence["Unit"] = ()) -> None:
        super().__init__()
        self.units, self.parts = nn.ModuleList(units), nn.ModuleList(parts)

    def forward(self, run: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
        """What the function gives, run while the weights are whole."""
        found = run(*inputs, **more)
        is_view = isinstance(found, Tensor) and found._is_view()
        return found.clone() if is_view else found  # FSDP2 hangs a hook on it, which views lose


class ShardedWeights(WholeWeights):
    """The policy's weights, of which each process holds a part; see `WholeWeights`.

    Frozen weights, such as those below adapters, stay whole: the reference has the same ones.

    Args:
        policy: is sharded here, in place: within each machine, where torchrun started several
            (hybrid sharding, HSDP), so that weights do not travel between them.
        forward: is told to run each block within its unit while minibatches are learned from.
    """

    def __init__(self, policy: nn.Module, world: Ranks, forward: Forward) -> None:
        super().__init__(policy, world)
        hooks = [(module, name, dict(getattr(module, name))) for module, name in _tables(policy)]
        frozen = {p for p in policy.parameters() if not p.requires_grad}
        self._forward, self._units = forward, {}
        # several machines: shards within each, and copies of them between
        self._n_parts = min(processes_per_node(), world.size)
        dims = {"parts": self._n_parts}
        if world.size > self._n_parts:
            dims = {"copies": world.size // self._n_parts} | dims
        mesh = init_device_mesh(world.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        for _, block in named_blocks(policy):
            if any(p.requires_grad for p in block.parameters()):
                self._units[block] = Unit([block])
                fully_shard(self._units[block], mesh=mesh, ignored_params=frozen)
        of_blocks = {p for block in self._units for p in block.parameters()}
        self._root = Unit([policy], list(self._units.values()))
        fully_shard(self._root, mesh=mesh, ignored_params=frozen | of_blocks)
        for unit in self._all_units():
            unit.set_gradient_divide_factor(1.0)  # a rank's terms are shares already: a sum
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_all_gather(_Gather(world, self._n_parts))
            unit.set_custom_reduce_scatter(_Reduce(world, self._n_parts))
        self._is_open = False
        self._heard: frozenset[Event] | None = None
        self._moments: dict[str, Tensor] | None = None
        self.open()  # FSDP2 makes up its mind at its first gathering
        for module, name, table in hooks:
            getattr(module, name).clear()
            getattr(module, name).update(table)
        self._close()
        self.shards: dict[str, DTensor] = {
            name: p for name, p in policy.named_parameters() if p.requires_grad
        }

    def _all_units(self) -> Iterator[Any]:
        yield from (self._root, *self._units.values())

    def open(self) -> None:
        """See `WholeWeights`."""
        if not self._is_open:
            for unit in self._all_units():
                unit.unshard()
            self._is_open = True

    def _close(self) -> None:
        for unit in self._all_units():
            unit.reshard()
        self._is_open = False

    @torch.no_grad()
    def _keep_changes(self) -> None:
        """Copy into the shards what whole weights are now: a checkpoint may have been loaded."""
        for name, whole in self.policy.named_parameters():
            if name in self.shards:
                self.shards[name].to_local().copy_(self._part(whole))

    def _part(self, whole: Tensor) -> Tensor:
        """This process's rows of a tensor, cut as FSDP2 cuts."""
        parts, number = whole.chunk(self._n_parts), self.world.rank % self._n_parts
        return parts[number] if number < len(parts) else whole[:0]

    @contextlib.contextmanager
    def learning(self, heard: Callable[[], Sequence[Event]]) -> Iterator[None]:
        """See `WholeWeights`; a listener that is added within is first heard in the next phase.

        Raises:
            ConfigError: a listener learns, while the other processes wait for it.
        """
        if self.world.is_apart:
            raise ConfigError(
                "parallel='fsdp' learns with all processes, and a listener runs on one; call "
                "learning_phase outside of listeners, or set parallel='ddp'."
            )
        self._heard = frozenset(self.world.of_main(list(heard())))
        self._keep_changes()
        self._close()
        yield  # where an error ends the phase, another process may be gone
        self._heard = None
        self.open()

    def run(self, forward: Callable[[], Any]) -> Any:
        """See `WholeWeights`."""
        found: list[Any] = []

        def tensors() -> tuple[Tensor, ...]:  # as FSDP2 looks for them
            found.append(forward())
            return tuple(vars(found[0]).values())

        self._forward.units = self._units
        try:
            given = self._root(tensors)
        finally:
            self._forward.units = {}
        return dataclasses.replace(found[0], **dict(zip(vars(found[0]), given, strict=True)))

    def add_up(self) -> None:
        """See `WholeWeights`: FSDP2 has summed them in the backward pass."""

    @property
    def is_learning(self) -> bool:
        """See `WholeWeights`."""
        return self._heard is not None and not self.world.is_apart

    @contextlib.contextmanager
    def shown(self, event: Event) -> Iterator[bool]:
        """See `WholeWeights`."""
        if event not in self._heard:
            yield False
            return
        gradients = self._whole_gradients()
        self.open()
        weights = dict(self.policy.named_parameters())
        for name, gradient in gradients.items():
            weights[name].grad = gradient
        yield True
        for weight in weights.values():
            weight.grad = None
        self._close()

    def _whole_gradients(self) -> dict[str, Tensor]:
        """The summed gradients by name; the main process keeps them, one by one."""
        found = {}
        for name, shard in self.shards.items():
            if shard.grad is not None:
                whole = self._whole(shard.grad)
                if self.world.is_main:
                    found[name] = whole
        return found

    def _whole(self, tensor: Any, purpose: str = "shown") -> Any:
        """A tensor of all processes' parts; what is whole is given back as it is."""
        if not isinstance(tensor, DTensor):
            return tensor
        self.world.bytes_sent[purpose] += tensor.to_local().nbytes * (self._n_parts - 1)
        with self.world.meeting():
            return tensor.full_tensor()

    def gather_moments(self, optimizer: Optimizer, is_due: bool) -> None:
        """See `WholeWeights`."""
        self._moments = None
        if self.world.is_apart or not self.world.of_main(is_due):
            return
        if not self.world.is_main:
            optimizer_tensors(optimizer, lambda x: self._whole(x, "saved").new_empty(0))
            return
        self._moments = optimizer_tensors(optimizer, lambda x: self._whole(x, "saved").cpu())

    @property
    def has_moments(self) -> bool:
        """See `WholeWeights`."""
        return self._moments is not None

    def moments(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """See `WholeWeights`; what `gather_moments` put together, once."""
        found, self._moments = self._moments or {}, None
        return found

    def load_moments(self, optimizer: Optimizer, tree: Any, tensors: Mapping[str, Tensor]) -> None:
        """See `WholeWeights`."""
        load_optimizer(optimizer, tree, tensors, self._sharded)

    @torch.no_grad()
    def _sharded(self, whole: Tensor, weight: Tensor) -> Tensor:
        """A whole moment of a weight, cut up as the weight is."""
        if whole.shape != weight.shape:
            return whole
        shard = torch.empty_like(weight, dtype=whole.dtype)
        shard.to_local().copy_(self._part(whole))
        return shard


def _tables(policy: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The tables of a model's modules that FSDP2 adds to."""
    for module in policy.modules():
        for name in STATE_HOOKS:
            yield module, name


class _Message:
    """A message of FSDP2's: counted, and its failure put in words.

    Args:
        n_parts: how many parts the weights are cut into, each of which a process has.
    """

    def __init__(self, world: Ranks, n_parts: int) -> None:
        self.world, self.n_parts = world, n_parts

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _send(self, purpose: str, nbytes: int, name: str, earlier: str, **given: Any) -> Any:
        """Send by torch's function of this name, or by the one that was there before it."""
        self.world.bytes_sent[purpose] += nbytes
        with self.world.meeting():
            return getattr(dist, name if hasattr(dist, name) else earlier)(**given)


class _Gather(_Message):
    """Weights, put together of the processes' parts."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        given = dict(output_tensor=output_tensor, input_tensor=input_tensor)
        given |= dict(group=group, async_op=async_op)
        nbytes = input_tensor.nbytes * (self.n_parts - 1)
        return self._send("weights", nbytes, "all_gather_single", "all_gather_into_tensor", **given)


class _Reduce(_Message):
    """Gradients, summed over the processes and cut up; then FSDP2 sums the copies of each part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        given = dict(output=output_tensor, input=input_tensor, op=op, group=group)
        nbytes = math.ceil(input_tensor.nbytes * (self.n_parts - 1) / self.n_parts)
        copies = self.world.size // self.n_parts  # whose sum goes round a ring twice
        nbytes += math.ceil(2 * output_tensor.nbytes * (copies - 1) / copies)
        names = "reduce_scatter_single", "reduce_scatter_tensor"
        return self._send("gradients", nbytes, *names, async_op=async_op, **given)
