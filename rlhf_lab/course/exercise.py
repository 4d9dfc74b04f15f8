"""The Exercise dataclass: reference, cases to compare on, hints, known wrong answers (slips)."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

# what a learner writes: a function or a class
Answer = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One set of arguments to call both functions with.

    Args:
        label: what is special about it, as the learner reads it.
        arguments: by parameter name; tensors are cloned before each call.
    """

    label: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Slip:
    """A mistake that people make, as an edit of the reference's source that makes it.

    Args:
        says: the mistake in plain words, as the learner reads it.
        edits: what stands in the reference, exactly once, and what stands there by mistake.
        raises: whether it ends in an error, as some of the commonest do.
    """

    says: str
    edits: Mapping[str, str]
    raises: bool = False


def call(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with its arguments by name."""
    return fn(**arguments)


@dataclass(frozen=True)
class Exercise:
    """One function or class that learners write.

    Args:
        lesson: the name of the lesson's master, such as "05_the_objective".
        reference: the package's own function or class, which is the solution.
        difficulty: from 1 to 5.
        minutes: that most people need.
        hints: three, from the idea over the shapes to the line.
        cases: makes the cases, seeded.
        slips: known mistakes, at least two. One that people make in several ways is there several
            times, under the same words.
        forms: edits of the reference that change nothing: other ways to write it, in which a slip
            may have other results. Each slip is tried in each of them, too.
        reads: from a wrong answer that no slip explains, and the case that it misses first, to what
            is wrong with it in words, or None. It calls the answer as it likes.
        gradients: the arguments whose gradient is compared.
        errors_tried: whether the check tries arguments that are refused. The stub then says which
            they are.
        methods: of a class, those that are the learner's to write; the others are given.
        observe: from a function and arguments to what is compared: a tensor, a number, or facts by
            name. It calls the function, once or more.
        step_free: whether the stub has the first paragraph of the docstring alone, so that the
            learner finds the steps.
    """

    lesson: str
    reference: Callable[..., Any]
    difficulty: int
    minutes: int
    hints: tuple[str, str, str]
    cases: Callable[[], tuple[Case, ...]]
    slips: tuple[Slip, ...]
    gradients: tuple[str, ...] = ()
    errors_tried: bool = False
    methods: tuple[str, ...] = ()
    observe: Callable[[Callable[..., Any], Mapping[str, Any]], Any] = call
    step_free: bool = False
    forms: tuple[Mapping[str, str], ...] = ()
    reads: Callable[[Callable[..., Any], Case], str | None] | None = None

    @property
    def name(self) -> str:
        """The function's or class's name, by which `check` finds the exercise."""
        return self.reference.__name__


def exercise_from(file: str) -> Callable[..., Exercise]:
    """A maker of exercises whose words stand in a TOML file of `course/exercises`.

    The file holds the name of the lesson and, by the reference's name, all of an `Exercise` that is
    numbers and words. A slip `says` its words itself, or names a `phrase` of phrases.toml.

    Returns a function of the reference and whatever of an `Exercise` is Python, by name.
    """
    phrases, written = _read("phrases.toml"), _read(file)

    def exercise(reference: Answer, **python: Any) -> Exercise:
        words = dict(written[reference.__name__])
        words["slips"] = [
            Slip(
                slip.get("says") or phrases[slip["phrase"]],
                slip["edits"],
                slip.get("raises", False),
            )
            for slip in words["slips"]
        ]
        lists = {name: tuple(word) for name, word in words.items() if isinstance(word, list)}
        return Exercise(written["lesson"], reference, **words | lists, **python)

    return exercise


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads((files(f"{__package__}.exercises") / file).read_text(encoding="utf-8"))
