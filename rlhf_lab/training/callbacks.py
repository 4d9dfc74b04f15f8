"""The named events of a run, at which any callable can look at everything that is there."""

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal, get_args

from rlhf_lab.errors import ConfigError
from rlhf_lab.training.listener_output import name_of, store_returned

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

WHERE_IT_IS = MappingProxyType(
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


def check_every(every: Any, of: str = "") -> None:
    """Refuse what cannot count phases.

    Raises:
        ConfigError: not a whole number, or below 1; `of` says whose it is.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every={every!r}{of} must be 1 or greater, in whole phases.")


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
        when = WHERE_IT_IS.get(name)
        if when is None:
            known = ", ".join([*self.__dict__, *WHERE_IT_IS])
            raise AttributeError(f"ctx has no field {name!r}; the fields are {known}.")
        raise AttributeError(f"ctx.{name} is not there at {self.event}; it is at {when}.")


class Callbacks:
    """Who wants to be called when.

    A dict that a callable returns is stored in the run's directory, under the callable's name (see
    `Run.returned`); anything else that it returns is not looked at. A callable that raises, or
    whose dict cannot be stored, is dropped with one warning, and the run goes on: looking at a run
    must not end it.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, list[tuple[int, str, Callable[[Context], Any]]]] = {}
        self._names: dict[str, Callable[[Context], Any]] = {}

    def on(
        self, event: Event, every: int = 1
    ) -> Callable[[Callable[[Context], Any]], Callable[[Context], Any]]:
        """Register the decorated callable for an event of every `every`-th phase.

        Raises:
            ConfigError: no such event, or `every` is no whole number above 0.
        """
        if event not in get_args(Event):
            raise ConfigError(
                f"event={event!r} is unknown; choose one of {', '.join(get_args(Event))}."
            )
        check_every(every)

        def register(listener: Callable[[Context], Any]) -> Callable[[Context], Any]:
            entry = every, self._name(listener), listener
            self._listeners.setdefault(event, []).append(entry)
            return listener

        return register

    def _name(self, listener: Callable[[Context], Any]) -> str:
        """The callable's own name, numbered on if another callable has it already."""
        first = name = name_of(listener)
        number = 1
        while self._names.setdefault(name.casefold(), listener) != listener:
            number += 1
            name = f"{first}_{number}"
        return name

    def listeners(self) -> list[Callable[[Context], Any]]:
        """All callables that are registered, once for each of their events."""
        return [listener for entries in self._listeners.values() for _, _, listener in entries]

    def hears(self, event: Event) -> bool:
        """Whether anyone registered for this event, of whichever phases."""
        return bool(self._listeners.get(event))

    def emit(self, event: Event, phase: int, **fields: Any) -> None:
        """Call everyone who registered for this event, in the order of registration."""
        for entry in list(self._listeners.get(event, [])):
            every, name, listener = entry
            if phase % every and event not in ("run_start", "run_end"):
                continue
            ctx = Context(event, phase, **fields)
            try:
                self._store(ctx, name, listener(ctx))
            except Exception as error:
                self._listeners[event].remove(entry)
                warnings.warn(
                    f"{name} raised {type(error).__name__} at {event} of phase {phase} and is "
                    f"switched off: {error}",
                    stacklevel=2,
                )

    def _store(self, ctx: Context, name: str, returned: Any) -> None:
        """Store a dict, if there is one and a place for it."""
        run = ctx.__dict__.get("run")
        if run is None or not isinstance(returned, dict):
            return
        where = {"phase": ctx.phase, "event": ctx.event}
        if "step" in ctx.__dict__:
            where["step"] = ctx.step
        if ctx.event == "checkpoint":
            where["checkpoint"] = ctx.checkpoint.stem
        store_returned(run, name, where, returned)
