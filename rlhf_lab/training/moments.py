"""The named moments of a run, at which any callable can look at everything that is there."""

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal, get_args

from rlhf_lab.errors import ConfigError

Moment = Literal[
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
        "terms": "after_loss to after_step",
        "grad_norm": "after_step",
        "report": "after_phase",
        "checkpoint": "checkpoint",
        "reports": "run_end",
    }
)


class Context:
    """What a callable sees at a moment; reading a field that is not there yet says when it is.

    Always there: `moment`, `phase` (starting at 0), `args`, `policy`, `reference`, and `run`, the
    run's directory (None in a phase that is run on its own).
    """

    def __init__(self, moment: Moment, phase: int, **fields: Any) -> None:
        self.__dict__.update(fields, moment=moment, phase=phase)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"ctx.{name} cannot be set; a context is read-only.")

    def __getattr__(self, name: str) -> Any:
        when = WHERE_IT_IS.get(name)
        if when is None:
            known = ", ".join([*self.__dict__, *WHERE_IT_IS])
            raise AttributeError(f"ctx has no field {name!r}; the fields are {known}.")
        raise AttributeError(f"ctx.{name} is not there at {self.moment}; it is at {when}.")


class Moments:
    """Who wants to be called when.

    A callable that raises is dropped with one warning, and the run goes on: looking at a run must
    not end it.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, list[tuple[int, Callable[[Context], Any]]]] = {}

    def on(
        self, moment: Moment, every: int = 1
    ) -> Callable[[Callable[[Context], Any]], Callable[[Context], Any]]:
        """Register the decorated callable for a moment of every `every`-th phase.

        Raises:
            ConfigError: no such moment, or `every` below 1.
        """
        if moment not in get_args(Moment):
            raise ConfigError(
                f"moment={moment!r} is unknown; choose one of {', '.join(get_args(Moment))}."
            )
        if every < 1:
            raise ConfigError(f"every={every} must be 1 or greater.")

        def register(listener: Callable[[Context], Any]) -> Callable[[Context], Any]:
            self._listeners.setdefault(moment, []).append((every, listener))
            return listener

        return register

    def emit(self, moment: Moment, phase: int, **fields: Any) -> None:
        """Call everyone who registered for this moment, in the order of registration."""
        for entry in list(self._listeners.get(moment, [])):
            every, listener = entry
            if phase % every and moment not in ("run_start", "run_end"):
                continue
            try:
                listener(Context(moment, phase, **fields))
            except Exception as error:
                self._listeners[moment].remove(entry)
                name = getattr(listener, "__name__", type(listener).__name__)
                warnings.warn(
                    f"{name} raised {type(error).__name__} at {moment} of phase {phase} and is "
                    f"switched off: {error}",
                    stacklevel=2,
                )
