"""Rich panels and tables of the course: the result of a check, a hint, the progress."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rlhf_lab.course.exercise import Case, Exercise
from rlhf_lab.course.grading import Verdict
from rlhf_lab.course.progress_file import ExerciseRecord
from rlhf_lab.errors import ConfigError

GOOD, BAD, DIM = "#008a64", "#d55e00", "#808080"
WIDTH = 88
STATE_MARKS = {"passed": ("✓", GOOD), "differs": ("✗", BAD), "unwritten": ("○", DIM)}


class LessonError(ConfigError):
    """An error in a lesson, which a notebook shows as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def dots(difficulty: int) -> str:
    """Format a difficulty from 1 to 5 as filled and empty dots."""
    return "●" * difficulty + "○" * (5 - difficulty)


def verdict_panel(exercise: Exercise, verdict: Verdict) -> RenderableType:
    """Return one line for a function that passes or is a stub, a panel for one that differs."""
    mark, color = STATE_MARKS[verdict.state]
    title = Text.assemble((f"{mark} ", f"bold {color}"), (exercise.name, "bold"))
    if verdict.state == "differs":
        difference = _difference(verdict)
        return Panel(difference, title=title, border_style=color, expand=False, width=WIDTH)
    more = f'  not written yet; a hint: hint("{exercise.name}")'
    if verdict.state == "passed":
        title.stylize(color)
        more = f"  {verdict.cases} case" + "s" * (verdict.cases != 1)
        if exercise.gradients:
            more += f", gradient of {' and '.join(exercise.gradients)}"
    return title.append(more, style="not bold")


def _difference(verdict: Verdict) -> Group:
    difference = verdict.difference
    case = Text(f"case: {format_case(difference.case)}")
    parts: list[RenderableType] = [case, Text(), Text(difference.rows[0][1])]
    if difference.kind != "error":
        table = Table("", "yours", "expected", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in difference.rows:
            table.add_row(*(Text(cell) for cell in row))
        parts = [case, table]
    if verdict.slip:
        parts.append(Text.assemble(("likely: ", f"bold {BAD}"), verdict.slip))
    return Group(*parts)


def format_case(case: Case) -> str:
    """Format a case as its label and arguments, tensors by their shapes."""
    arguments = [
        f"{name}{list(value.shape)}" if isinstance(value, Tensor) else f"{name}={value}"
        for name, value in case.arguments.items()
        if isinstance(value, (Tensor, int, float, str))
    ]
    return f"{case.label}: {', '.join(arguments)}" if arguments else case.label


def hint_panel(exercise: Exercise, number: int) -> Panel:
    """Return the panel of one hint, numbered from 1."""
    left = len(exercise.hints) - number
    more = f"{left} more" if left else "the last one"
    title = f"{exercise.name}, hint {number} of {len(exercise.hints)} ({more})"
    text = Text(exercise.hints[number - 1])
    return Panel(text, title=title, border_style=GOOD, expand=False, width=WIDTH)


def progress_table(exercises: Sequence[Exercise], records: Mapping[str, ExerciseRecord]) -> Table:
    """Return a row per exercise of each lesson in progress, and one for each other lesson."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("exercise", "level", "min", "state", "checks", "hints"):
        table.add_column(heading, justify="right" if heading in ("min", "checks") else "left")
    for lesson in dict.fromkeys(exercise.lesson for exercise in exercises):
        within = [exercise for exercise in exercises if exercise.lesson == lesson]
        heading, minutes = Text(lesson, style="bold"), sum(e.minutes for e in within)
        if not any(e.name in records for e in within):
            table.add_row(heading, "", str(minutes), Text(f"{len(within)} to write", style="dim"))
            continue
        table.add_row(heading)
        for exercise in within:
            table.add_row(*_progress_row(exercise, records.get(exercise.name, ExerciseRecord())))
    done = sum(records.get(e.name, ExerciseRecord()).state == "passed" for e in exercises)
    minutes = sum(e.minutes for e in exercises)
    table.caption = f"{done} of {len(exercises)} passed; {minutes} minutes in all"
    return table


def _progress_row(exercise: Exercise, record: ExerciseRecord) -> tuple[RenderableType, ...]:
    mark, color = STATE_MARKS[record.state]
    return (
        exercise.name,
        dots(exercise.difficulty),
        str(exercise.minutes),
        Text(f"{mark} {record.state}", style=color),
        str(record.attempts),
        f"{record.hints}/{len(exercise.hints)}",
    )
