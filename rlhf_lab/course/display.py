"""Rich panels and tables of the course: the result of a check, a hint, the progress."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rlhf_lab.course.cases import Arguments
from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.grading import Difference, Verdict
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
    if verdict.difference is not None:
        case = verdict.difference.case
        parts = [Text(f"case: {format_case(case, exercise.cases()[case])}")]
        parts += _difference_parts(verdict.difference)
        if verdict.slip:
            parts.append(Text.assemble(("likely: ", f"bold {BAD}"), verdict.slip))
        return Panel(Group(*parts), title=title, border_style=color, expand=False, width=WIDTH)
    more = f'  not written yet; for a hint, run hint("{exercise.name}")'
    if verdict.state == "passed":
        title.stylize(color)
        more = f"  {verdict.cases} case" + "s" * (verdict.cases != 1)
        if exercise.gradients:
            more += f", gradient of {' and '.join(exercise.gradients)}"
    return title.append(more, style="not bold")


def _difference_parts(difference: Difference) -> list[RenderableType]:
    if difference.kind == "error":
        return [Text(), Text(difference.rows[0][1])]
    table = Table("", "yours", "expected", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in difference.rows:
        table.add_row(*map(Text, row))
    return [table]


def format_case(label: str, arguments: Arguments) -> str:
    """Format a case as its label and arguments, tensors by their shapes."""
    parts = [
        f"{name}{list(value.shape)}" if isinstance(value, Tensor) else f"{name}={value}"
        for name, value in arguments.items()
        if isinstance(value, (Tensor, int, float, str))
    ]
    return f"{label}: {', '.join(parts)}" if parts else label


def hint_panel(exercise: Exercise, number: int) -> Panel:
    """Return the panel of one hint, numbered from 1."""
    left = len(exercise.hints) - number
    more = f"{left} more" if left else "the last one"
    title = f"{exercise.name}, hint {number} of {len(exercise.hints)} ({more})"
    text = Text(exercise.hints[number - 1])
    return Panel(text, title=title, border_style=GOOD, expand=False, width=WIDTH)


def progress_table(exercises: Sequence[Exercise], records: Mapping[str, ExerciseRecord]) -> Table:
    """Return a row per exercise of the lesson that was checked last, and a total as caption."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for heading in ("exercise", "level", "min", "state", "checks", "hints"):
        table.add_column(heading, justify="right" if heading in ("min", "checks") else "left")
    lessons = {e.name: e.lesson for e in exercises}
    lesson = next((lessons[x] for x in reversed(records) if x in lessons), exercises[0].lesson)
    for e in exercises:
        if e.lesson == lesson:
            record = records.get(e.name, ExerciseRecord())
            mark, color = STATE_MARKS[record.state]
            state = Text(f"{mark} {record.state}", style=color)
            row = (e.name, dots(e.difficulty), str(e.minutes), state, str(record.attempts))
            table.add_row(*row, f"{record.hints}/{len(e.hints)}")
    done = sum(records.get(e.name, ExerciseRecord()).state == "passed" for e in exercises)
    table.caption = f"all lessons: {done} of {len(exercises)} passed"
    return table
