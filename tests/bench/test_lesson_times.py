"""What lessons say of their cells' seconds is found, and stands beside what the cells take."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from benchmarks.lessons import Seconds, rows_of, seconds_named_of_all, seconds_taken, sections_of

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "solutions").glob("*.ipynb"))


@pytest.fixture
def lesson():
    cells = [
        new_markdown_cell("All cells together run in about 7 seconds on one core.", id="intro"),
        new_code_cell("import time"),
        new_markdown_cell("It trains.\n\n(2 s on one core)", id="training"),
        new_code_cell("guess = 1"),
        new_code_cell("time.sleep(0.3)"),
        new_markdown_cell("And rests.", id="rest"),
        new_code_cell("1 + 1"),
    ]
    return new_notebook(cells=cells)


def test_a_text_speaks_of_the_code_below_it_up_to_the_next_text(lesson):
    sections = sections_of(lesson)
    assert [section.code for section in sections] == [[1], [3, 4], [6]]
    assert [section.seconds_named for section in sections] == [None, 2, None]
    assert seconds_named_of_all(lesson) == 7


def test_rows_are_medians_and_a_long_cell_that_says_nothing_is_shown(lesson):
    short = {1: Seconds(9.5, 0.5), 3: Seconds(0, 0), 4: Seconds(2, 1.0), 6: Seconds(0, 0)}
    rounds = [
        short,
        short | {4: Seconds(4, 2.0), 6: Seconds(9, 5.0)},
        short | {4: Seconds(3, 9.0), 6: Seconds(8, 4.0)},
    ]
    assert rows_of("it", lesson, rounds) == [
        ["it", "all", 7, 20.5, 7.5],
        ["it", "training", 2, 3, 2.0],
        ["it", "rest", "nothing", 8, 4.0],
    ]


@pytest.mark.kernel
def test_cells_are_timed_in_a_kernel(lesson):
    taken = seconds_taken(lesson)
    assert taken.keys() == {1, 3, 4, 6}
    assert taken[4].clock > 0.29 > taken[3].clock
    assert taken[4].processor < 0.29  # it slept


@pytest.mark.kernel
def test_processor_seconds_are_those_of_the_kernel():
    busy = "import time\nwhile time.process_time() < 0.2 + START: pass"
    cells = [new_code_cell("import time\nSTART = time.process_time()"), new_code_cell(busy)]
    taken = seconds_taken(new_notebook(cells=cells))
    assert 0.15 < taken[1].processor < taken[1].clock + 0.05


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_says_what_it_takes(path):
    assert seconds_named_of_all(nbformat.read(path, as_version=4)) is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--only", "99_x"], "only='99_x' is no lesson"), (["--times", "0"], "times=0 must be 1")],
)
def test_a_mistake_is_answered_in_one_sentence(flags, said, warm_python):
    done = warm_python.run(["-m", "benchmarks.lessons", *flags])
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr
