"""FSDP2 (`fully_shard`) on the trained weights, of which each process keeps a part.

Weights, gradients and moments are sharded. In a learning phase the weights of each block are
gathered for its forward pass and again for its backward pass, where its gradient is summed and
split at once. Between learning phases all weights are gathered: sampling reads them for every
token, and callbacks in the main process read them without the other processes.

accelerate was considered: its FSDP2 plugin wraps the same `fully_shard` and changes the classes of
the policy's modules, gathers only whole state dicts, not gradients and moments for callbacks, and
saves sharded checkpoints with pickled metadata.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import Forward
from rlhf_lab.models.hooked_model import named_blocks
from rlhf_lab.parallel.launcher import processes_per_node
from rlhf_lab.parallel.world import World
from rlhf_lab.training.checkpoint import flatten_state

if TYPE_CHECKING:
    from rlhf_lab.training.callbacks import Callbacks
    from rlhf_lab.training.trainer import RLHFTrainer

STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")  # which FSDP2 adds to
SAVE_EVENTS = ("run_start", "after_phase", "run_end")


class Unit(nn.Module):
    """Modules whose weights are gathered together while a function runs, maybe with other units.

    FSDP2 changes the class of a sharded module and adds hooks. That happens to this module, so the
    hooks, types and copies of the policy do not change.
    """

    def __init__(self, parts: Sequence[nn.Module], units: Sequence["Unit"] = ()) -> None:
        super().__init__()
        self.units, self.parts = nn.ModuleList(units), nn.ModuleList(parts)

    def forward(self, run: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
        """Run the function while the weights are gathered."""
        result = run(*inputs, **more)
        is_view = isinstance(result, Tensor) and result._is_view()
        return result.clone() if is_view else result  # FSDP2 adds a hook, which views lose


class ShardedWorld(World):
    """Processes that each keep a part of the policy's trained weights.

    Frozen weights, such as those below adapters, stay whole: the reference shares them. With
    several machines the weights are sharded within each (HSDP). The policy is sharded in place
    until `open` is called, so the optimizer is made of shards. In a learning phase, `forward` runs
    each block within its unit.
    """

    def __init__(self, device: torch.device, policy: nn.Module, forward: Forward) -> None:
        super().__init__(device)
        self.policy, self.forward = policy, forward
        tables = [getattr(m, name) for m in policy.modules() for name in STATE_HOOKS]
        hooks = [dict(table) for table in tables]
        frozen = {p for p in policy.parameters() if not p.requires_grad}
        self.n_parts = min(processes_per_node(), self.size)
        dims = {"parts": self.n_parts}
        if self.size > self.n_parts:
            dims = {"copies": self.size // self.n_parts} | dims
        mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        self.units: dict[nn.Module, Any] = {}
        for _, block in named_blocks(policy):
            if any(p.requires_grad for p in block.parameters()):
                self.units[block] = Unit([block])
                fully_shard(self.units[block], mesh=mesh, ignored_params=frozen)
        of_blocks = {p for block in self.units for p in block.parameters()}
        self.root: Any = Unit([policy], list(self.units.values()))
        fully_shard(self.root, mesh=mesh, ignored_params=frozen | of_blocks)
        for unit in (self.root, *self.units.values()):
            unit.set_gradient_divide_factor(1.0)  # the terms of a rank are fractions already
            unit.set_force_sum_reduction_for_comms(True)
        self.is_open, self._moments = False, None
        self._learning_events: Sequence[str] | None = None  # with callbacks, in a learning phase
        self.open()  # FSDP2 initializes at its first gathering
        for table, before in zip(tables, hooks, strict=True):
            table.clear()
            table.update(before)
        self._close()
        trained = ((name, p) for name, p in policy.named_parameters() if p.requires_grad)
        self.shards: dict[str, DTensor] = dict(trained)

    def open(self) -> None:
        """Gather all weights on every process."""
        if not self.is_open:
            for unit in (self.root, *self.units.values()):
                unit.unshard()
            self.is_open = True

    def _close(self) -> None:
        for unit in (self.root, *self.units.values()):
            unit.reshard()
        self.is_open = False

    @torch.no_grad()
    def _copy_to_shards(self) -> None:
        """Copy changes of the whole weights: a checkpoint may have been loaded."""
        for name, whole in self.policy.named_parameters():
            if name in self.shards:
                self.shards[name].to_local().copy_(self._part(whole))

    def _part(self, whole: Tensor) -> Tensor:
        """Return this process's rows of a tensor, split as FSDP2 does."""
        parts, number = whole.chunk(self.n_parts), self.rank % self.n_parts
        return parts[number] if number < len(parts) else whole[:0]

    @contextlib.contextmanager
    def learning(self, callbacks: "Callbacks") -> Iterator[None]:
        """Shard the weights; callbacks that are registered within are first called afterwards."""
        if self.is_apart:
            raise ConfigError(
                "parallel='fsdp' learns with all processes, and a callback runs in one. Call "
                "learning_phase outside of callbacks, or set parallel='ddp'."
            )
        self._learning_events = self.broadcast(
            [e for e in callbacks.registered if callbacks.has_callbacks(e)]
        )
        self._copy_to_shards()
        self._close()
        with self.detect_lost_rank():
            yield  # after an error another process may be gone, so the weights stay sharded
        self._learning_events = None
        self.open()

    def wrap_forward(self, compute_part: Callable[..., Any]) -> Callable[..., Any]:
        """Run the forward pass with the weights of one block at a time."""

        def compute(part: Any) -> Any:
            results: list[Any] = []

            def tensors() -> tuple[Tensor, ...]:  # FSDP2 looks for tensors in a tuple
                results.append(compute_part(part))
                return tuple(vars(results[0]).values())

            self.forward.units = self.units
            try:
                outputs = self.root(tensors)
            finally:
                self.forward.units = {}
            named = zip(vars(results[0]), outputs, strict=True)
            return dataclasses.replace(results[0], **dict(named))

        return compute

    def sum_gradients(self, policy: nn.Module) -> None:
        """Do nothing: FSDP2 has summed the gradients in the backward pass."""

    def emit(
        self, trainer: "RLHFTrainer", event: Any, phase: int | None, fields: dict[str, Any]
    ) -> None:
        """Call callbacks in the main process, with whole weights, gradients and moments."""
        if event in SAVE_EVENTS:
            is_saved = event != "after_phase" or trainer.recorder.is_save_phase(trainer.phase + 1)
            self._gather_moments(trainer.optimizer, is_saved)
        if self._learning_events is None:
            super().emit(trainer, event, phase, fields)
            return
        if event not in self._learning_events:
            return
        gradients = {}
        for name, shard in self.shards.items():
            whole = None if shard.grad is None else self._gather_whole(shard.grad)
            if self.is_main and whole is not None:
                gradients[name] = whole
        self.open()
        weights = dict(self.policy.named_parameters())
        for name, gradient in gradients.items():
            weights[name].grad = gradient
        super().emit(trainer, event, phase, fields)
        for weight in weights.values():
            weight.grad = None
        self._close()

    def _gather_whole(self, tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        with self.detect_lost_rank():
            return tensor.full_tensor()

    def _gather_moments(self, optimizer: Optimizer, is_saved: bool) -> None:
        """Gather the optimizer's moments in the main process, which saves them."""
        self._moments = None
        if not self.broadcast(is_saved):
            return

        def gather(tensor: Tensor) -> Tensor:
            whole = self._gather_whole(tensor)
            return whole.cpu() if self.is_main else whole.new_empty(0)

        moments: dict[str, Tensor] = {}
        flatten_state(optimizer.state_dict(), "optimizer", moments)
        moments = {name: gather(tensor) for name, tensor in moments.items()}
        self._moments = moments if self.is_main else None

    @property
    def has_moments(self) -> bool:
        """True after `emit` has gathered the moments."""
        return self._moments is not None

    def take_moments(self) -> dict[str, Tensor]:
        """Return the gathered moments once."""
        moments, self._moments = self._moments or {}, None
        return moments

    @torch.no_grad()
    def shard_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a saved state with the moments split as the weights are."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        for index, fields in state["state"].items():
            for name, whole in fields.items():
                if whole.shape == weights[index].shape:
                    fields[name] = torch.empty_like(weights[index], dtype=whole.dtype)
                    fields[name].to_local().copy_(self._part(whole))
        return state
