"""The command `python -m tools.course build|record|runs`: lessons, and records over seeds."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from tyro.conf import FlagCreatePairsOff, Positional

from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError
from tools.course.builder import MAP, build_lesson, map_text, masters
from tools.course.record import RECORDS, record_lesson, write_parts
from tools.course.size import lesson_name


def build(
    lessons: Positional[tuple[str, ...]] = (),
    again: FlagCreatePairsOff[bool] = False,
    root: Path = Path("."),
) -> int:
    """Write both notebooks of each lesson from its master; files that are up to date are kept.

    Args:
        lessons: names of lessons, such as the_objective; all by default.
        again: execute solutions even if their cells have not changed.
        root: root of the repository.
    """
    for master in _masters(root, lessons):
        changed, is_executed = build_lesson(master, root, again)
        files = ", ".join(str(path.relative_to(root)) for path in changed) or "nothing"
        ran = "executed" if is_executed else "solution is up to date"
        print_line(f"{master.stem}: {ran}; changed {files}")
    if (root / MAP).exists():
        (root / MAP).write_text(map_text(root), encoding="utf-8")
    return 0


def record(
    lessons: Positional[tuple[str, ...]],
    seeds: int = 5,
    real_models: FlagCreatePairsOff[bool] = False,
    root: Path = Path("."),
) -> int:
    """Run lessons once per seed, and store the figures that they show next to other seeds.

    Args:
        lessons: names of lessons, such as what_rlhf_changed.
        seeds: number of seeds.
        real_models: run with the models in the folder in RLHF_LAB_REAL_MODELS, and store
            LESSON_real.json.
        root: root of the repository.
    """
    for master in _masters(root, lessons):
        print_line(f"wrote {record_lesson(master, root, seeds, real_models)}")
    return 0


def runs(record: Positional[str], parts: Positional[tuple[str, ...]] = ()) -> int:
    """Train the runs of a record that lessons show, and store their numbers.

    Args:
        record: name of the record, such as symptoms.
        parts: parts of the record; all by default, otherwise the others are kept.
    """
    from tools.course.runs import RECORDS_OF_RUNS

    if record not in RECORDS_OF_RUNS:
        known = ", ".join(RECORDS_OF_RUNS)
        raise ConfigError(f"record {record!r} is unknown; choose from {known}.")
    made = RECORDS_OF_RUNS[record]
    heading = {"made_by": f"python -m tools.course runs {record}", **made.heading}
    write_parts(RECORDS / f"{record}.json", heading, made.parts, parts, made.digits)
    return 0


def _masters(root: Path, lessons: Sequence[str]) -> list[Path]:
    known = {lesson_name(master): master for master in masters(root)}
    for lesson in lessons:
        if lesson not in known:
            raise ConfigError(f"lesson {lesson!r} is unknown; choose from {', '.join(known)}.")
    return [known[lesson] for lesson in lessons or known]


COMMANDS = MappingProxyType({"build": build, "record": record, "runs": runs})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    return run_program(COMMANDS, "tools.course", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
