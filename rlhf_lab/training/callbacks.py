"""Callbacks: the named events of a run, at which any callable can look at what is there."""

import inspect
import warnings
from collections.abc import Callable
from numbers import Number
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.training.callback_output import function_name, plain
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
]
"""Events of a run, in the order in which they come."""

FIELD_AVAILABILITY = MappingProxyType(
    {
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
)


def validate_every(every: Any, of: str = "") -> None:
    """Refuse, with a ConfigError, what is no whole number from 1 on; `of` says whose it is."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every={every!r}{of} must be 1 or greater, in whole phases.")


def validate_callable(function: Any, place: str, takes: tuple[str, ...]) -> None:
    """Refuse, with a ConfigError, what cannot be called with the arguments that it will be given.

    Args:
        place: what the function was given to.
        takes: the names of the arguments, by position.
    """
    if not callable(function):
        raise ConfigError(f"{place} was given {function!r:.60}, which is no function; give one.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*takes)
    except TypeError:
        name, given = function_name(function), ", ".join(takes)
        raise ConfigError(
            f"{place} calls {name}({given}), which is defined as {name}{signature}; "
            "change its arguments."
        ) from None


class Context:
    """What a callable sees at an event; reading a field that is not there yet says when it is.

    Always there: `event`, `phase` (starting at 0), `args`, `policy`, `reference`, `kl_coef`, the
    weight of the KL penalty that is in force, and `run`, the run's directory (None in a phase that
    is run on its own).
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
    """The sign of a run's remark that a function of this name was switched off."""
    return f"{name} is switched off"


class Registration(NamedTuple):
    """One callable at one event, called in every `every`-th phase; after others if it is `last`.

    What it returns is stored under its `name`, unless that is None, as the recorder's is.
    """

    every: int
    name: str | None
    listener: Callback
    last: bool


class Callbacks:
    """The callables that are registered for the events of a run.

    A dict that a callable returns is stored in the run's directory, under the callable's name (see
    `Run.returned`); other return values are ignored. A callable that raises, or whose dict cannot
    be stored, is dropped with one warning, and the run goes on: looking at a run must not end it.

    Attributes:
        dropped: of each that was dropped, by its name: the phase, and the warning.
    """

    def __init__(self) -> None:
        self._registered: dict[str, list[Registration]] = {}
        self._names: dict[str, Callback] = {}
        self.dropped: dict[str, tuple[int, str]] = {}
        self._told: set[str] = set()

    def on(
        self, event: Event, every: int = 1, last: bool = False
    ) -> Callable[[Callback], Callback]:
        """Register the decorated callable for an event of every `every`-th phase.

        Args:
            last: call it after those that are not registered so.

        Raises:
            ConfigError: no such event, `every` is no whole number above 0, or the callable cannot
                be called with a context alone.
        """
        if event not in get_args(Event):
            raise ConfigError(
                f"event={event!r} is unknown; choose one of {', '.join(get_args(Event))}."
            )
        validate_every(every)

        def register(listener: Callback) -> Callback:
            validate_callable(listener, f"on({event!r})", ("ctx",))
            self._add(event, Registration(every, self._name(listener), listener, last))
            return listener

        return register

    def record(self, event: Event, listener: Callback, last: bool = False) -> None:
        """Register the recorder, whose errors end the run: what it cannot write is lost."""
        self._add(event, Registration(1, None, listener, last))

    def _add(self, event: Event, new: Registration) -> None:
        # sorted() is stable: the order of registration holds among the first and among the last.
        entries = [*self._registered.get(event, []), new]
        self._registered[event] = sorted(entries, key=lambda entry: entry.last)

    def _name(self, listener: Callback) -> str:
        """The callable's own name, numbered on if another callable has it already."""
        first = name = function_name(listener)
        number = 1
        while self._names.setdefault(name.casefold(), listener) != listener:
            number += 1
            name = f"{first}_{number}"
        return name

    def listeners(self) -> list[Callback]:
        """All callables that are registered, once for each of their events."""
        return [entry.listener for entries in self._registered.values() for entry in entries]

    def has_callbacks(self, event: Event) -> bool:
        """True if a callback is registered for this event, of whichever phases."""
        return bool(self._registered.get(event))

    def registered_events(self) -> list[Event]:
        """The events for which a callback is registered."""
        return [event for event in get_args(Event) if self.has_callbacks(event)]

    def emit(self, event: Event, phase: int, **fields: Any) -> None:
        """Call everything that is registered for this event, in the order of registration."""
        for entry in list(self._registered.get(event, [])):
            if phase % entry.every and event not in ("run_start", "run_end"):
                continue
            ctx = Context(event, phase, **fields)
            if entry.name is None:
                entry.listener(ctx)
                continue
            try:
                self._store(ctx, entry.name, entry.listener(ctx))
            except Exception as error:
                self._registered[event].remove(entry)
                said = (
                    f"{entry.name} raised {type(error).__name__} at {event} of phase {phase} and "
                    f"is switched off: {error}"
                )
                self.dropped[entry.name] = (phase, said)
                warnings.warn(said, stacklevel=2)

    def _store(self, ctx: Context, name: str, returned: Any) -> None:
        """Add a line to `returned/NAME.jsonl`: where a dict was returned, then the dict."""
        run = ctx.__dict__.get("run")
        if isinstance(returned, Tensor | np.ndarray | Number) and name not in self._told:
            self._told.add(name)
            kind = "tensor" if isinstance(returned, Tensor) else type(returned).__name__
            warnings.warn(
                f"{name} returned a {kind}, which is not stored; return a dict of it, such as "
                f'{{"{name}": {kind}}}.',
                stacklevel=3,
            )
        if run is None or not isinstance(returned, dict):
            return
        where = {"phase": ctx.phase, "event": ctx.event}
        if "step" in ctx.__dict__:
            where["step"] = ctx.step
        if ctx.event == "checkpoint":
            where["checkpoint"] = ctx.checkpoint.stem
        for key in where:
            if key in returned:
                raise ConfigError(f"the dict has a key {key!r}, which each record has; rename it.")
        run.append(f"{RETURNED}/{name}.jsonl", [where | plain(returned, "the dict")])
