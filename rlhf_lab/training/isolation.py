"""Training undisturbed by what looks on: random states, flags, hooks and gradients put back."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HOOK_STATE, HOOK_TABLES
from rlhf_lab.torch_modes import torch_modes_kept
from rlhf_lab.training.callbacks import Event


@contextlib.contextmanager
def no_side_effects(*modules: nn.Module) -> Iterator[None]:
    """Let code look at modules, and put everything that it may have touched back afterwards.

    1. Note the global random states, the train/eval flags, the hooks and the gradients.
    2. Run the code without gradients and without gradient tracking.
    3. Put back what was noted, whether the code raised or not.

    Raises:
        ConfigError: the code added a hook that stays, or removed one.
    """
    flags = [(module, module.training) for top in modules for module in top.modules()]
    parts = [(name, part) for top in modules for name, part in top.named_modules()]
    hooks = [(name, part, _hooks_of(part)) for name, part in parts]
    try:
        with detached_gradients(*modules, lend=False), _forked_random(modules), torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training
        changed = [name for name, *hooked in hooks if _put_back_hooks(*hooked)]
    if changed:
        raise ConfigError(
            f"the hooks of {changed[0] or 'the model'} were changed while activations were "
            "captured, and have been put back; take hooks off again (model.hooks), or add one "
            "that is to stay in a function given to trainer.on."
        )


@contextlib.contextmanager
def detached_gradients(*modules: nn.Module, lend: bool) -> Iterator[None]:
    """Take the gradients of modules away, or lend out copies of them, and put them back after."""
    gradients = [(p, p.grad) for top in modules for p in top.parameters()]
    for parameter, gradient in gradients:
        parameter.grad = gradient.clone() if lend and gradient is not None else None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def preserve_gradients(policy: nn.Module, event: Event) -> Iterator[None]:
    """Let callbacks of an event call backward() without a change to what training does.

    Only between the objective and the step are there gradients that count: the next minibatch
    clears those of any other event.
    """
    if event not in ("after_loss", "after_backward"):
        with torch_modes_kept():
            yield
        return
    with torch_modes_kept(), detached_gradients(policy, lend=True), _graphs_kept():
        yield


@contextlib.contextmanager
def _graphs_kept() -> Iterator[None]:
    """Backward passes in here keep the graph, which training's own is still to go through."""
    backward, grad = torch.autograd.backward, torch.autograd.grad
    torch.autograd.backward = partial(_keep_graph, backward, 2)
    torch.autograd.grad = partial(_keep_graph, grad, 3)
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = backward, grad


def _keep_graph(function: Callable[..., Any], place: int, *inputs: Any, **more: Any) -> Any:
    """Call a function with retain_graph=True, whether it is given in its place or by name."""
    if len(inputs) > place:
        inputs = (*inputs[:place], True, *inputs[place + 1 :])
    else:
        more["retain_graph"] = True
    return function(*inputs, **more)


def _hooks_of(module: nn.Module) -> dict[str, Any]:
    """The hooks of a module as they are: torch's tables, and what TransformerLens notes of them."""
    names = (*HOOK_TABLES, *HOOK_STATE)
    return {name: copy(getattr(module, name)) for name in names if hasattr(module, name)}


def _put_back_hooks(module: nn.Module, noted: dict[str, Any]) -> bool:
    """Let a module have these hooks again, and say whether it had others."""
    differed = any(getattr(module, table) != noted[table] for table in HOOK_TABLES)
    for name, value in noted.items():
        if name in HOOK_TABLES:  # in place: the handles of hooks refer to the table
            getattr(module, name).clear()
            getattr(module, name).update(value)
        else:
            setattr(module, name, value)
    return differed


@contextlib.contextmanager
def _forked_random(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep torch's, numpy's and Python's global random states as they are."""
    places = {p.device for module in modules for p in module.parameters()}
    devices = [place for place in places if place.type == "cuda"]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
