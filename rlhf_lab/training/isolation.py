"""Context managers that restore random states, flags, hooks and gradients after a callback."""

import contextlib
import random
from collections.abc import Iterator
from copy import copy

import numpy as np
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HOOK_STATE, HOOK_TABLES
from rlhf_lab.torch_modes import torch_modes_kept
from rlhf_lab.training.callbacks import Event


@contextlib.contextmanager
def no_side_effects(*modules: nn.Module) -> Iterator[None]:
    """Run code without gradients; restore random states, flags, hooks and gradients afterwards."""
    parts = [(name, part) for top in modules for name, part in top.named_modules()]
    flags = [part.training for _, part in parts]
    tables = [[dict(vars(part)[table]) for table in HOOK_TABLES] for _, part in parts]
    states = [{n: copy(vars(part)[n]) for n in HOOK_STATE if n in vars(part)} for _, part in parts]
    devices = {p.device for top in modules for p in top.parameters() if p.device.type == "cuda"}
    numpy_state, python_state = np.random.get_state(), random.getstate()
    changed = []
    try:
        forked = torch.random.fork_rng(devices=list(devices))
        with detached_gradients(*modules, lend=False), forked, torch.no_grad():
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for (name, part), training, before, state in zip(parts, flags, tables, states, strict=True):
            # not by setattr, which takes ten times as long for a module
            vars(part).update(state, training=training)
            now = [vars(part)[table] for table in HOOK_TABLES]
            if now != before:
                changed.append(name)
                for table, hooks in zip(now, before, strict=True):
                    table.clear()  # in place: the handles of hooks refer to the table
                    table.update(hooks)
    if changed:
        raise ConfigError(
            f"the hooks of {changed[0] or 'the model'} were changed while activations were "
            "captured, and have been restored. Remove hooks after use (model.hooks), or add a "
            "permanent one in a function given to trainer.on."
        )


@contextlib.contextmanager
def detached_gradients(*modules: nn.Module, lend: bool) -> Iterator[None]:
    """Remove the gradients of modules, or lend copies of them, and restore them afterwards."""
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
    """Restore gradients and modes after callbacks, which may call backward(retain_graph=True)."""
    with torch_modes_kept(), contextlib.ExitStack() as stack:
        if event in ("after_loss", "after_backward"):  # otherwise cleared before the step
            stack.enter_context(detached_gradients(policy, lend=True))
        yield
