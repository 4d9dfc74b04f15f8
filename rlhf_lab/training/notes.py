"""Notes of a checkpoint: what a run writes beside the tensors, and what it must find there."""

import dataclasses
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


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
        "reference_phase": (_is_count, "a number of phases"),
        "reward_moments": (_HAS_MOMENTS, "a count, a mean and a sum of squares"),
    }
)
"""What a run writes in the notes of a checkpoint, and that in words."""
NEEDED = ("phase", "best", "scheduler", "kl_coef")
"""The notes that a run cannot go on without."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether something is a list of such entries."""
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _is_any(_: Any) -> bool:
    return True


WANDB_NAMES = frozenset(("name", "project", "entity", "group", "job_type", "notes", "tags"))
"""What a run is called in wandb, and where it is."""
_HAS_CHANGE = _has(**{"phase": _is_count, "field": _is_text, "from": _is_any, "to": _is_any})
_HAS_REMARK = _has(phase=_is_count, text=_is_text)
FORM_OF_INFO = MappingProxyType(
    {
        "id": (_is_text, "the text that names a run"),
        "wandb_id": (_is_text, "the id of a run"),
        "wandb_run": (
            lambda v: isinstance(v, dict) and v.keys() <= WANDB_NAMES,
            f"an object of {', '.join(sorted(WANDB_NAMES))}",
        ),
        "wandb_url": (lambda v: v is None or _is_text(v), "an address"),
        "wandb_directories": (_are(_is_text), "a list of directories"),
        "saved": (lambda v: v is None or _is_count(v), "a number of phases"),
        "changes": (_are(_HAS_CHANGE), "a list of phase, field, from and to"),
        "remarks": (
            lambda v: v is None or (isinstance(v, dict) and all(map(_HAS_REMARK, v.values()))),
            "an object of remarks, each a phase and a text",
        ),
        "own_parts": (_are(_is_text), "a list of names"),
        "interventions": (
            _are(_has(name=_is_text, site=_is_text, during=_are(_is_text))),
            "a list of interventions, each a name, a site and stages",
        ),
        "rewarded_class": (
            lambda v: v is None or _has(index=_is_count, label=_is_text)(v),
            "a class's index and label",
        ),
        "sources": (lambda v: v is None or isinstance(v, dict), "an object of checksums"),
    }
)
"""What a run writes in run.json besides its arguments, and that in words."""


def notes_of(trainer: "RLHFTrainer", name: str, phase: int, tensors: int) -> dict[str, Any]:
    """What is noted beside so many tensors of a checkpoint of that name, after so many phases."""
    state = trainer.scheduler.state_dict()
    return {
        "run": trainer.recorder.run_id,
        "name": name,
        "args": trainer.args.to_dict(),
        "tensors": tensors,
        "phase": phase,
        "best": trainer.recorder.best,
        "scheduler": {part: state[part] for part in ("last_epoch", "_step_count", "_last_lr")},
        "kl_coef": trainer.kl_controller.kl_coef,
        "reward_moments": dataclasses.asdict(trainer.rewards.moments),
        "reference_phase": trainer.reference_phase,
    }


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
