"""Callbacks: the named events of a run, at which any callable can read its data.

Context managers at the end restore what a callback may change.
"""

import contextlib
import random
import traceback
import warnings
from bisect import insort
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HOOK_STATE, HOOK_TABLES
from rlhf_lab.torch_modes import torch_modes_kept
from rlhf_lab.training.run_dir import RETURNED

Event = Literal[  # in the order in which they are emitted
    "run_start", "after_rollout", "after_score", "before_minibatch", "after_loss",
    "after_backward", "after_step", "after_phase", "checkpoint", "run_end",
]  # fmt: skip

FIELD_AVAILABILITY = {
    "samples": "after_rollout and after_score",
    "rollout": "after_score",
    "minibatch": "before_minibatch to after_step",
    "step": "before_minibatch to after_step",
    "terms": "after_loss to after_step",
    "grad_norm": "after_step",
    "report": "after_phase",
    "checkpoint": "checkpoint",
    "reports": "run_end",
}


def validate_every(every: Any, of: str = "") -> None:
    """Raise ConfigError unless `every` is an integer >= 1; `of` names its owner."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every={every!r}{of} must be 1 or greater, in whole phases.")


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of an object's class, in letters, digits and _."""
    function = getattr(function, "func", function)
    name = getattr(function, "__name__", type(function).__name__)
    return "".join(c if c.isalnum() or c == "_" else " " for c in name).strip().replace(" ", "_")


class Context:
    """Data that a callback can read at an event.

    Always available: `event`, `phase` (from 0), `args`, `policy`, `reference`, `kl_coef` (the
    current coefficient of the KL penalty) and `run`, the run's directory (None in a phase that is
    run on its own). Reading a field too early raises an error that names its events. The policy's
    gradients are copies: to change gradients, use `parameter.register_hook`.
    """

    def __init__(self, event: Event, phase: int, **fields: Any) -> None:
        self.__dict__.update(fields, event=event, phase=phase)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"ctx.{name} cannot be set; a context is read-only.")

    def __getattr__(self, name: str) -> Any:
        when, event = FIELD_AVAILABILITY.get(name, "no event"), vars(self).get("event")
        raise AttributeError(f"ctx.{name} is not there at {event}; it is at {when}.")


Callback = Callable[[Context], Any]


def describe_error(error: Exception, event: str, phase: int) -> str:
    """Return the end of a warning that an error has switched a callback or a probe off."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"raised {type(error).__name__} at {event} of phase {phase} and is switched off"
    return f"{what}: {error} ({Path(place.filename).name}, line {place.lineno})"


def switched_off(name: str) -> str:
    """Return the key of a run's diagnostic that a callback was switched off."""
    return f"{name} is switched off"


class Registration(NamedTuple):
    """One callback at one event; its results are stored under `name`, if that is not None."""

    every: int  # it is called in every `every`-th phase
    name: str | None
    callback: Callback
    last: bool  # it is called after others


class Callbacks:
    """The callbacks of a run by event.

    A dict that a callback returns is stored under its name (see `Run.returned`). A callback that
    raises, or whose dict cannot be stored, is removed with one warning.
    """

    def __init__(self) -> None:
        self.registered: dict[str, list[Registration]] = {}
        self.dropped: dict[str, tuple[int, str]] = {}  # phase and warning by name
        self._names: dict[str, Callback] = {}

    def on(
        self, event: Event, every: int = 1, last: bool = False
    ) -> Callable[[Callback], Callback]:
        """Register a callable for each `every`-th phase of an event; ConfigError if one is bad."""
        if event not in get_args(Event):
            known = ", ".join(get_args(Event))
            raise ConfigError(f"Unknown event {event!r}. Choose one of: {known}.")
        validate_every(every)

        def register(callback: Callback) -> Callback:
            if not callable(callback):
                raise ConfigError(f"{callback!r:.60} at {event} is not a function. Pass one.")
            earlier = [entry.callback for entry in self.registered.get(event, ())]
            name, code = (getattr(callback, x, None) for x in ("__qualname__", "__code__"))
            named = [f for f in earlier if getattr(f, "__qualname__", None) == name]
            is_redefined = any(getattr(f, "__code__", None) is not code for f in named)
            may_repeat = name in (None, "_") or "<" in name  # closures and lambdas share a name
            if callback in earlier or (is_redefined and not may_repeat):  # a loop shares the code
                message = f"{function_name(callback)} is registered twice at {event}."
                warnings.warn(f"{message} Make another trainer, or rename it.", stacklevel=2)
            self._add(event, Registration(every, self._name(callback), callback, last))
            return callback

        return register

    def record(self, event: Event, callback: Callback, last: bool = False) -> None:
        """Register the recorder, whose errors end the run: what it cannot write is lost."""
        self._add(event, Registration(1, None, callback, last))

    def _add(self, event: Event, new: Registration) -> None:
        insort(self.registered.setdefault(event, []), new, key=lambda entry: entry.last)

    def _name(self, callback: Callback) -> str:
        first = name = function_name(callback)
        number = 1
        while self._names.setdefault(name.casefold(), callback) != callback:
            number += 1
            name = f"{first}_{number}"
        return name

    def listeners(self) -> list[Callback]:
        return [entry.callback for entries in self.registered.values() for entry in entries]

    def entries(self, event: Event, phase: int) -> list[Registration]:
        """Return the callbacks of an event that a phase calls; at the ends of a run, all."""
        is_end = event in ("run_start", "run_end")
        return [x for x in self.registered.get(event, ()) if is_end or phase % x.every == 0]

    def emit(self, event: Event, phase: int, **fields: Any) -> None:
        for entry in self.entries(event, phase):
            ctx = Context(event, phase, **fields)
            if entry.name is None:
                entry.callback(ctx)
                continue
            try:
                self._store(ctx, entry.name, entry.callback(ctx))
            except Exception as error:
                self.registered[event].remove(entry)
                message = f"{entry.name} {describe_error(error, event, phase)}"
                self.dropped[entry.name] = (phase, message)
                warnings.warn(message, stacklevel=2)

    def _store(self, ctx: Context, name: str, result: Any) -> None:
        run = ctx.__dict__.get("run")
        if result is not None and not isinstance(result, dict):
            kind = type(result).__name__  # Python shows equal warnings once
            message = f"{name} returned a {kind}, which is not stored. Return a dict of it."
            warnings.warn(message, stacklevel=2)
        if run is None or not isinstance(result, dict):
            return
        where = {"phase": ctx.phase, "event": ctx.event}
        where |= {"step": ctx.step} if "step" in ctx.__dict__ else {}
        where |= {"checkpoint": ctx.checkpoint.stem} if ctx.event == "checkpoint" else {}
        for key in where:
            if key in result:
                raise ConfigError(f"the dict has a key {key!r}, which each record has. Rename it.")
        run.append(f"{RETURNED}/{name}.jsonl", [where | result])


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
