"""Exercises: reference, cases to compare on, hints, known wrong answers (slips); all of them."""

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from typing import Any

from rlhf_lab import functional
from rlhf_lab.course.cases import Cases, declared_cases

EXERCISE_FILES = ("rewards layers objective ppo debugging_ppo policy verifiable claims").split()

Answer = Callable[..., Any]  # what a learner writes: a function or a class


@dataclass(frozen=True)
class Slip:
    """A common mistake, as an edit of the reference's source.

    Args:
        says: the mistake, as the learner reads it.
        edits: text that the reference contains exactly once, and its replacement.
        raises: True if it raises an error.
    """

    says: str
    edits: Mapping[str, str]
    raises: bool = False


def call(fn: Answer, **arguments: Any) -> Any:
    """Call a function with its arguments."""
    return fn(**arguments)


@dataclass(frozen=True)
class Exercise:
    """One function or class that learners write.

    Args:
        lesson: the name of the lesson's master, such as "the_objective".
        reference: the package's own function or class, which is the solution.
        difficulty, importance: from 1 to 5.
        minutes: typical time.
        hints: three: the idea, the shapes, the line.
        cases: a function that returns the seeded arguments of each case by its label.
        slips: known mistakes, at least two. Variants of a mistake have the same words.
        forms: edits of the reference that keep its results, in which a slip may have others.
            Each slip is also tried in each form.
        gradients: the arguments whose gradient is compared.
        errors_tried: True if the check tries invalid arguments. The stub then lists them.
        methods: methods of a class that the learner writes.
        observe: a function of answer and arguments that returns the values to compare: a
            tensor, a number, or facts by name.
        step_free: True if the stub has only the first paragraph of the docstring.
    """

    lesson: str
    reference: Callable[..., Any]
    difficulty: int
    importance: int
    minutes: int
    hints: tuple[str, str, str]
    cases: Callable[[], Cases]
    slips: tuple[Slip, ...]
    gradients: tuple[str, ...] = ()
    errors_tried: bool = False
    methods: tuple[str, ...] = ()
    observe: Callable[..., Any] = call
    step_free: bool = False
    forms: tuple[Mapping[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The function's or class's name, by which `check` finds the exercise."""
        return self.reference.__name__


def make_exercise(
    reference: Answer, cases: Callable[[], Cases] | None = None, observe: Callable[..., Any] = call
) -> Exercise:
    """Return the exercise of a reference, whose words are in a TOML file of `course/exercises`.

    The file also has its cases if they are literals (`cases`) or options of `standard_cases`.
    Its slips have their own words (`says`), or those of a `phrase` in phrases.toml.
    """
    phrases, words = _read_words()
    fields = dict(words[reference.__name__])
    fields["slips"] = [
        Slip(slip.get("says") or phrases[slip["phrase"]], slip["edits"], slip.get("raises", False))
        for slip in fields["slips"]
    ]
    declared = fields.pop("standard_cases", ()), fields.pop("cases", {})
    cases = cases or (lambda: declared_cases(reference, *declared))
    lists = {name: tuple(field) for name, field in fields.items() if isinstance(field, list)}
    return Exercise(reference=reference, cases=cases, observe=observe, **fields | lists)


def exercise(
    reference: Answer, observe: Callable[..., Any] = call
) -> Callable[[Callable[[], Cases]], Exercise]:
    """Make an exercise of a reference from the decorated function, which returns its cases."""
    return lambda cases: make_exercise(reference, cases, observe)


@functools.cache
def all_exercises() -> tuple[Exercise, ...]:
    """Return all exercises, in the order of the TOML files.

    Exercises that no Python file makes have a function of `rlhf_lab.functional` as reference.
    """
    modules = (import_module(f"rlhf_lab.course.exercises.{name}") for name in EXERCISE_FILES)
    values = (value for module in modules for value in vars(module).values())
    made = {value.name: value for value in values if isinstance(value, Exercise)}
    _, words = _read_words()
    return tuple(made.get(name) or make_exercise(getattr(functional, name)) for name in words)


def find_exercise(fn: Answer | str) -> Exercise:
    """Return the exercise with the name of a function or class.

    Raises:
        ValueError: If no exercise has this name.
    """
    name = fn if isinstance(fn, str) else getattr(fn, "__name__", repr(fn))
    exercises = {exercise.name: exercise for exercise in all_exercises()}
    if name not in exercises:
        raise ValueError(f"{name} is not an exercise. Choose one of: {', '.join(exercises)}.")
    return exercises[name]


@functools.cache
def _read_words() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Read the phrases, and the words of each exercise by the name of its reference."""
    words, phrases = {}, {}
    for file in sorted(files(f"{__package__}.exercises").iterdir(), key=lambda file: file.name):
        if file.name == "phrases.toml":
            phrases = tomllib.loads(file.read_text(encoding="utf-8"))
        elif file.name.endswith(".toml"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            lesson = content.pop("lesson")
            words |= {name: fields | {"lesson": lesson} for name, fields in content.items()}
    return phrases, words
