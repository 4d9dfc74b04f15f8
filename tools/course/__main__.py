"""The command `python -m tools.course build|check|record`: build and verify the lessons."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType

from rich.console import Console
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional

from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.course.registry import all_exercises
from rlhf_lab.errors import ConfigError, LoadError


def build(
    lessons: Positional[tuple[str, ...]] = (),
    again: FlagCreatePairsOff[bool] = False,
    root: Path = Path("."),
) -> int:
    """Write both notebooks of each lesson from its master; what is up to date stays as it is.

    Args:
        lessons: names of lessons, such as 05_the_objective; all when none is given.
        again: execute solutions even if their cells have not changed.
        root: the repository's root.
    """
    builder = _builder()
    known = {master.stem: master for master in builder.masters(root)}
    for lesson in _known_lessons(lessons, known) or known:
        built = builder.build_lesson(known[lesson], root, again)
        files = ", ".join(str(path.relative_to(root)) for path in built.changed)
        done = f"wrote {files}" if files else "nothing has changed"
        ran = "executed" if built.executed else "solution is up to date"
        print_line(f"{lesson}: {ran}; {done}")
    return 0


def record(
    lessons: Positional[tuple[str, ...]] = (),
    seeds: int = 5,
    real_models: FlagCreatePairsOff[bool] = False,
    root: Path = Path("."),
) -> int:
    """Run lessons once per seed, and store the figures that they show beside other seeds.

    Args:
        lessons: names of lessons, such as 09_what_rlhf_changed.
        seeds: how many, from 1 on.
        real_models: run with the models in the folder that RLHF_LAB_REAL_MODELS names, and store
            the figures as LESSON_real.json.
        root: the repository's root.
    """
    from tools.course.record import record_lesson

    if not lessons:
        raise ConfigError("lessons is empty; name those that compare figures over seeds.")
    known = {master.stem: master for master in _builder().masters(root)}
    for lesson in _known_lessons(lessons, known):
        print_line(f"wrote {record_lesson(known[lesson], root, seeds, real_models)}")
    return 0


def check(root: Path = Path(".")) -> int:
    """Prove that each exercise and lesson is complete, and that no wrong answer passes; status 1
    when something is wrong with one.

    Args:
        root: the repository's root.
    """
    _builder().masters(root)  # a wrong root is told before the exercises, which take a minute
    from tools.course.gate import lesson_problems, try_exercise

    table = Table("exercise", "cases", "slips rejected and named", "generic rejected", box=None)
    tallies = [try_exercise(exercise) for exercise in all_exercises()]
    for tally in tallies:
        table.add_row(tally.name, str(tally.cases), str(tally.slips), str(tally.generic))
    slips, generic = (sum(getattr(t, kind) for t in tallies) for kind in ("slips", "generic"))
    table.add_row(f"{len(tallies)} in all", "", str(slips), str(generic), style="bold")
    problems = [f"{t.name}: {problem}" for t in tallies for problem in t.problems]
    problems += lesson_problems(root)
    Console().print(table)
    for problem in problems or ["every exercise and lesson is complete"]:
        print_line(problem)
    return 1 if problems else 0


def _known_lessons(lessons: Sequence[str], known: Mapping[str, Path]) -> Sequence[str]:
    """The lessons that were named, or a refusal of one that is not there."""
    for lesson in lessons:
        if lesson not in known:
            raise ConfigError(f"lesson {lesson!r} is unknown; choose from {', '.join(known)}.")
    return lessons


def _builder() -> ModuleType:
    """The notebook builder."""
    return _of_authors("builder")


def _of_authors(name: str) -> ModuleType:
    """A module that needs packages which only authors have."""
    try:
        return import_module(f"tools.course.{name}")
    except ModuleNotFoundError as error:
        raise LoadError(
            f"{error.name} is not installed; install what authors need: pip install -e '.[dev]'."
        ) from error


COMMANDS = MappingProxyType({"build": build, "check": check, "record": record})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    return run_program(COMMANDS, "tools.course", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
