"""Weights of a run: whole on every process, which is all there is to it without FSDP2."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import Forward
from rlhf_lab.parallel import World
from rlhf_lab.training.callbacks import Event
from rlhf_lab.training.checkpoint import load_optimizer, optimizer_tensors
from rlhf_lab.training.ranks import add_gradients_up


class WholeWeights:
    """The policy's weights, gradients and moments, whole on every process.

    `ShardedWeights` has the same methods, for weights of which a process holds a part.

    Args:
        policy: the model that learns.
        world: the processes of the run.
    """

    def __init__(self, policy: nn.Module, world: World) -> None:
        self.policy, self.world = policy, world

    def open(self) -> None:
        """Put the weights together on every process, where they stay until the next learning."""

    @contextlib.contextmanager
    def learning(self, heard: Callable[[], Sequence[Event]]) -> Iterator[None]:
        """Within, minibatches are learned from.

        Args:
            heard: the events that the main process has listeners for.
        """
        yield

    def run(self, forward: Callable[[], Any]) -> Any:
        """What the forward pass of a part of a minibatch gives, with its graph."""
        return forward()

    def add_up(self) -> None:
        """Put the sum of the processes' gradients in the place of each."""
        add_gradients_up(self.world, self.policy)

    @property
    def is_learning(self) -> bool:
        """Whether listeners are to look at weights within `shown` only."""
        return False

    @contextlib.contextmanager
    def shown(self, event: Event) -> Iterator[bool]:
        """Within, weights and gradients are whole, if it says so: where listeners look at them."""
        yield True

    def gather_moments(self, optimizer: Optimizer, is_due: bool) -> None:
        """Put the optimizer's moments together on the main process, if it is about to save them.

        Args:
            is_due: whether it is, as the main process knows.
        """

    @property
    def has_moments(self) -> bool:
        """Whether this process can give the moments by itself."""
        return True

    def moments(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's state as whole tensors; see `checkpoint.optimizer_tensors`."""
        return optimizer_tensors(optimizer)

    def load_moments(self, optimizer: Optimizer, tree: Any, tensors: Mapping[str, Tensor]) -> None:
        """Restore the optimizer's state; see `checkpoint.load_optimizer`."""
        load_optimizer(optimizer, tree, tensors)


def weights_of(policy: nn.Module, args: RLHFArgs, world: World, forward: Forward) -> WholeWeights:
    """The weights of a run, sharded now if `args.parallel` says so: before there is an optimizer.

    They are shards then until `open` is called, so that the optimizer can be made of shards.
    """
    if args.parallel != "fsdp":
        return WholeWeights(policy, world)
    from rlhf_lab.training.sharded_weights import ShardedWeights  # which imports much of torch

    return ShardedWeights(policy, world, forward)
