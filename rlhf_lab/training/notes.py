"""Notes of a checkpoint: what a run writes beside the tensors, and what it must find there."""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _has(**parts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether something is an object with these parts."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and holds(value[name]) for name, holds in parts.items())
    )


def _are_rates(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_number, value))


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


_HAS_MOMENTS = _has(count=_is_count, mean=_is_finite, m2=lambda v: _is_finite(v) and v >= 0)
_HAS_BEST = _has(phase=_is_count, mean_reward=_is_number)
FORM_OF_NOTES = MappingProxyType(
    {
        "phase": (_is_count, "a number of phases"),
        "kl_coef": (lambda v: _is_number(v) and 0 <= v < math.inf, "a number, 0 or greater"),
        "best": (lambda v: v is None or _HAS_BEST(v), "a phase and its mean reward"),
        "scheduler": (
            _has(last_epoch=_is_count, _step_count=_is_count, _last_lr=_are_rates),
            "the state of a schedule with a rate for each group",
        ),
        "reward_moments": (_HAS_MOMENTS, "a count, a mean and a sum of squares"),
    }
)
"""What a run writes in the notes of a checkpoint, and that in words."""
NEEDED = ("phase", "best", "scheduler", "kl_coef")
"""The notes that a run cannot go on without."""


def check_notes(notes: Any) -> None:
    """Refuse notes that are not those of a run's checkpoint; fields that it lacks are no error.

    Raises:
        ValueError: the first field that is not what a run writes there.
    """
    if not isinstance(notes, dict):
        raise ValueError(f"its notes are {notes!r:.40}, not an object")
    for name, value in notes.items():
        holds, meant = FORM_OF_NOTES.get(name, (lambda _: True, ""))
        if not holds(value):
            raise ValueError(f"its notes have {name}={value!r:.40}, not {meant}")
