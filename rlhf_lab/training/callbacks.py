"""Callbacks: the named events of a run, at which any callable can read its data."""

import inspect
import warnings
from collections.abc import Callable
from numbers import Number
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.training.callback_output import function_name, to_json
from rlhf_lab.training.run_dir import RETURNED

Event = Literal[
    "run_start",
    "after_rollout",
    "after_score",
    "before_minibatch",
    "after_loss",
    "after_backward",
    "after_step",
    "after_phase",
    "checkpoint",
    "run_end",
]  # in the order in which they are emitted

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


def validate_callable(function: Any, place: str, parameters: tuple[str, ...]) -> None:
    """Raise ConfigError unless a function can be called with these positional arguments.

    Args:
        place: the call that the function was passed to, for the message.
    """
    if not callable(function):
        raise ConfigError(f"{place} requires a function, got {function!r:.60}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        name, arguments = function_name(function), ", ".join(parameters)
        raise ConfigError(
            f"{place} calls {name}({arguments}), which is defined as {name}{signature}. "
            "Change its parameters."
        ) from None


class Context:
    """Data that a callback can read at an event.

    Always there: `event`, `phase` (from 0), `args`, `policy`, `reference`, `kl_coef` (the current
    coefficient of the KL penalty) and `run`, the run's directory (None in a phase that is run on
    its own). Reading a field too early raises an error that names its events.
    """

    def __init__(self, event: Event, phase: int, **fields: Any) -> None:
        self.__dict__.update(fields, event=event, phase=phase)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"ctx.{name} cannot be set; a context is read-only.")

    def __getattr__(self, name: str) -> Any:
        when = FIELD_AVAILABILITY.get(name)
        if when is None:
            known = ", ".join([*self.__dict__, *FIELD_AVAILABILITY])
            raise AttributeError(f"ctx has no field {name!r}; the fields are {known}.")
        raise AttributeError(f"ctx.{name} is not there at {self.event}; it is at {when}.")


Callback = Callable[[Context], Any]


def switched_off(name: str) -> str:
    """Return the key of a run's diagnostic that a callback was switched off."""
    return f"{name} is switched off"


class Registration(NamedTuple):
    """One callback at one event, called in every `every`-th phase; after others if it is `last`.

    Its results are stored under `name`; the recorder's, which is None, are not.
    """

    every: int
    name: str | None
    callback: Callback
    last: bool


class Callbacks:
    """The callbacks of a run by event.

    A dict that a callback returns is stored in the run's directory, under the callback's name (see
    `Run.returned`); other results are ignored. A callback that raises, or whose dict cannot be
    stored, is removed with one warning: an error in reading a run must not end it.

    Attributes:
        registered: by event, in the order of the calls.
        dropped: phase and warning of each callback that was removed, by name.
    """

    def __init__(self) -> None:
        self.registered: dict[str, list[Registration]] = {}
        self.dropped: dict[str, tuple[int, str]] = {}
        self._names: dict[str, Callback] = {}
        self._warned: set[str] = set()

    def on(
        self, event: Event, every: int = 1, last: bool = False
    ) -> Callable[[Callback], Callback]:
        """Register the decorated callable for an event of every `every`-th phase.

        Args:
            last: call it after those that are not `last`.

        Raises:
            ConfigError: If the event is unknown, `every` is not an integer >= 1, or the function
                cannot be called with a context.
        """
        if event not in get_args(Event):
            raise ConfigError(
                f"event={event!r} is unknown; choose one of {', '.join(get_args(Event))}."
            )
        validate_every(every)

        def register(callback: Callback) -> Callback:
            validate_callable(callback, f"on({event!r})", ("ctx",))
            self._add(event, Registration(every, self._name(callback), callback, last))
            return callback

        return register

    def record(self, event: Event, callback: Callback, last: bool = False) -> None:
        """Register the recorder, whose errors end the run: what it cannot write is lost."""
        self._add(event, Registration(1, None, callback, last))

    def _add(self, event: Event, new: Registration) -> None:
        # sorted() is stable, so the order of registration holds among the first and the last
        entries = [*self.registered.get(event, []), new]
        self.registered[event] = sorted(entries, key=lambda entry: entry.last)

    def _name(self, callback: Callback) -> str:
        """Return the callback's name, with a number if another callback has it."""
        first = name = function_name(callback)
        number = 1
        while self._names.setdefault(name.casefold(), callback) != callback:
            number += 1
            name = f"{first}_{number}"
        return name

    def listeners(self) -> list[Callback]:
        """Return all callbacks, once for each of their events."""
        return [entry.callback for entries in self.registered.values() for entry in entries]

    def has_callbacks(self, event: Event) -> bool:
        """Return True if a callback is registered for this event, in any phase."""
        return bool(self.registered.get(event))

    def registered_events(self) -> list[Event]:
        """Return the events for which a callback is registered."""
        return [event for event in get_args(Event) if self.registered.get(event)]

    def emit(self, event: Event, phase: int, **fields: Any) -> None:
        """Call the callbacks of this event, in the order of registration."""
        for entry in list(self.registered.get(event, [])):
            if phase % entry.every and event not in ("run_start", "run_end"):
                continue
            ctx = Context(event, phase, **fields)
            if entry.name is None:
                entry.callback(ctx)
                continue
            try:
                self._store(ctx, entry.name, entry.callback(ctx))
            except Exception as error:
                self.registered[event].remove(entry)
                message = (
                    f"{entry.name} raised {type(error).__name__} at {event} of phase {phase} and "
                    f"is switched off: {error}"
                )
                self.dropped[entry.name] = (phase, message)
                warnings.warn(message, stacklevel=2)

    def _store(self, ctx: Context, name: str, result: Any) -> None:
        """Append a dict to `returned/NAME.jsonl`, after phase and event."""
        run = ctx.__dict__.get("run")
        if isinstance(result, Tensor | np.ndarray | Number) and name not in self._warned:
            self._warned.add(name)
            kind = "tensor" if isinstance(result, Tensor) else type(result).__name__
            warnings.warn(
                f"{name} returned a {kind}, which is not stored; return a dict of it, such as "
                f'{{"{name}": {kind}}}.',
                stacklevel=3,
            )
        if run is None or not isinstance(result, dict):
            return
        where = {"phase": ctx.phase, "event": ctx.event}
        if "step" in ctx.__dict__:
            where["step"] = ctx.step
        if ctx.event == "checkpoint":
            where["checkpoint"] = ctx.checkpoint.stem
        for key in where:
            if key in result:
                raise ConfigError(f"the dict has a key {key!r}, which each record has; rename it.")
        run.append(f"{RETURNED}/{name}.jsonl", [where | to_json(result, "the dict")])
