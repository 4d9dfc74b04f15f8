"""FSDP2 (`fully_shard`) on the trained weights, of which each process keeps a part.

Weights, gradients and moments are sharded. In a learning phase the weights of each block are
gathered for its forward pass and again for its backward pass, where its gradient is summed and
split at once. Between learning phases all weights are gathered: sampling reads them for every
token, and callbacks in the main process read them without the other processes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import named_blocks
from rlhf_lab.parallel.world import World
from rlhf_lab.training.checkpoint import flatten_state
from rlhf_lab.training.checkpoint import weights as trained_weights
from rlhf_lab.training.ppo import ObjectiveTerms

if TYPE_CHECKING:
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
        result = run(*inputs, **more)
        is_view = isinstance(result, Tensor) and result._is_view()
        return result.clone() if is_view else result  # FSDP2 adds a hook, which views lose


class ShardedWorld(World):
    """Processes that each keep a part of the policy's trained weights.

    Frozen weights, such as those below adapters, stay whole: the reference shares them. The policy
    is sharded in place until `open` is called, so the optimizer is made of shards. In a learning
    phase, `forward` runs each block within its unit.
    """

    def __init__(self, trainer: "RLHFTrainer") -> None:
        super().__init__(trainer.device)
        self.trainer, policy = trainer, trainer.policy
        tables = [getattr(m, name) for m in policy.modules() for name in STATE_HOOKS]
        hooks = [dict(table) for table in tables]
        mesh = init_device_mesh(self.device.type, (self.size,))
        frozen = {p for p in policy.parameters() if not p.requires_grad}
        self.units: dict[nn.Module, Any] = {
            block: fully_shard(Unit([block]), mesh=mesh, ignored_params=frozen)
            for _, block in named_blocks(policy)
            if any(p.requires_grad for p in block.parameters())
        }
        of_blocks = {p for block in self.units for p in block.parameters()}
        root: Any = Unit([policy], list(self.units.values()))
        self.root = fully_shard(root, mesh=mesh, ignored_params=frozen | of_blocks)
        for unit in (self.root, *self.units.values()):
            unit.set_gradient_divide_factor(1.0)  # the terms of a rank are fractions already
            unit.set_force_sum_reduction_for_comms(True)
        self.moments = None
        self._learning_events: Sequence[str] | None = None  # with callbacks, in a learning phase
        self.open()  # FSDP2 initializes at its first gathering
        for table, before in zip(tables, hooks, strict=True):
            table.clear()
            table.update(before)
        self._close()
        self.shards: dict[str, Any] = trained_weights(policy)

    def open(self) -> None:
        for unit in (self.root, *self.units.values()):
            unit.unshard()

    def _close(self) -> None:
        for unit in (self.root, *self.units.values()):
            unit.reshard()

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Shard the weights; callbacks that are registered within are first called afterwards."""
        if self.is_apart:
            raise ConfigError(
                "parallel='fsdp' learns with all processes, and a callback runs in one. Call "
                "learning_phase outside of callbacks, or set parallel='ddp'."
            )
        callbacks = self.trainer.callbacks
        events = [event for event, entries in callbacks.registered.items() if entries]
        self._learning_events = self.broadcast(events)
        whole = dict(self.trainer.policy.named_parameters())
        for name, shard in self.shards.items():  # a checkpoint may have been loaded
            _copy_part(whole[name], shard)
        self._close()
        with self.detect_lost_rank():
            yield  # after an error another process may be gone, so the weights stay sharded
        self._learning_events = None
        self.open()

    def wrap_forward(self, compute_part: Callable[..., Any]) -> Callable[..., Any]:

        def compute(part: Any) -> ObjectiveTerms:
            self.trainer.forward.units = self.units
            try:  # FSDP2 looks for tensors in a tuple
                return ObjectiveTerms(*self.root(lambda: tuple(vars(compute_part(part)).values())))
            finally:
                self.trainer.forward.units = {}

        return compute

    def sum_gradients(self, policy: nn.Module) -> None:
        """Do nothing: FSDP2 has summed the gradients in the backward pass."""

    def emit(self, trainer: "RLHFTrainer", event: Any, phase: int | None, **fields: Any) -> None:
        """Call callbacks in the main process, with whole weights, gradients and moments."""
        if event in SAVE_EVENTS:
            is_saved = event != "after_phase" or trainer.recorder.is_save_phase(trainer.phase + 1)
            self.moments = self._gather_moments() if self.broadcast(is_saved) else None
        if self._learning_events is None:
            super().emit(trainer, event, phase, **fields)
            self.moments = None
        elif event in self._learning_events:
            grads = {name: self._gather_whole(shard.grad) for name, shard in self.shards.items()}
            self.open()
            weights = dict(trainer.policy.named_parameters())
            for name, gradient in grads.items():
                weights[name].grad = gradient
            super().emit(trainer, event, phase, **fields)
            for weight in weights.values():
                weight.grad = None
            self._close()

    def _gather_whole(self, tensor: Any) -> Any:
        """Return a whole tensor in the main process, None in the others."""
        if isinstance(tensor, DTensor):
            with self.detect_lost_rank():
                tensor = tensor.full_tensor()
        return tensor if self.is_main else None

    def _gather_moments(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        flatten_state(self.trainer.optimizer.state_dict(), "optimizer", tensors)
        whole = ((name, self._gather_whole(tensor)) for name, tensor in tensors.items())
        return {name: tensor.cpu() for name, tensor in whole if tensor is not None}

    def shard_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        for index, fields in state["state"].items():
            for name, whole in fields.items():
                if whole.shape == weights[index].shape:
                    fields[name] = torch.empty_like(weights[index], dtype=whole.dtype)
                    _copy_part(whole, fields[name])
        return state


@torch.no_grad()
def _copy_part(whole: Tensor, shard: DTensor) -> None:
    part = distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)
    shard.to_local().copy_(part.to_local())
