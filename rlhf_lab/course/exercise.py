"""The Exercise dataclass: reference, cases to compare on, hints, known wrong answers (slips)."""

import functools
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


def make_exercise(reference: Answer, **python: Any) -> Exercise:
    """Return the exercise of a reference, whose words are in a TOML file of `course/exercises`.

    Its slips have their own words (`says`), or those of a `phrase` in phrases.toml.

    Args:
        python: the fields of `Exercise` that are Python.
    """
    phrases, words = _read_words()
    fields = dict(words[reference.__name__])
    fields["slips"] = [
        Slip(slip.get("says") or phrases[slip["phrase"]], slip["edits"], slip.get("raises", False))
        for slip in fields["slips"]
    ]
    lists = {name: tuple(field) for name, field in fields.items() if isinstance(field, list)}
    return Exercise(reference=reference, **fields | lists, **python)


@functools.cache
def _read_words() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Read the phrases, and the words of each exercise by the name of its reference."""
    words, phrases = {}, {}
    for file in files(f"{__package__}.exercises").iterdir():
        if file.name == "phrases.toml":
            phrases = tomllib.loads(file.read_text(encoding="utf-8"))
        elif file.name.endswith(".toml"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            lesson = content.pop("lesson")
            words |= {name: fields | {"lesson": lesson} for name, fields in content.items()}
    return phrases, words
