"""Numbers in the text of the lessons are those that their cells print or hold."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.course import builder
from tools.course.prose import unsupported_numbers

ROOT = Path(__file__).parents[2]
FROM_ELSEWHERE = {
    "00_start": ["900"],  # comparisons, in the paper that the sentence cites
    "05_the_objective": ["10,000", "640"],  # the setting's default, and a suggestion to try
}


@pytest.mark.parametrize("master", builder.masters(ROOT), ids=lambda path: path.stem)
def test_every_number_in_the_text_stands_in_a_cell(master: Path) -> None:
    notebook = nbformat.read(master.with_suffix(".ipynb"), as_version=4)
    missing = set(unsupported_numbers(notebook))
    assert missing <= set(FROM_ELSEWHERE.get(master.stem, []))


def lesson(text: str, printed: str = "", source: str = "") -> nbformat.NotebookNode:
    """A notebook of one text and one cell."""
    outputs = [new_output("stream", text=printed)] if printed else []
    return new_notebook(cells=[new_markdown_cell(text), new_code_cell(source, outputs=outputs)])


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("it reads 0.98 of it", "R2 0.9812"),
        ("a drop of -1.25 nats", "-1.2471"),
        ("84 % of the KL", "share 0.8391"),
        ("84 % of the KL", "84%"),
        ("1,024 reviews", "1024"),
        ("two terms, 4 tokens, in 2019, `x = 77`, $x^{31}$, lesson 06", ""),
    ],
)
def test_a_number_that_a_cell_prints_is_found(text: str, printed: str) -> None:
    assert unsupported_numbers(lesson(text, printed)) == []


@pytest.mark.parametrize(
    ("text", "printed", "missing"),
    [
        ("it reads 0.98 of it", "R2 0.9712", ["0.98"]),
        ("84 % of the KL", "share 0.82", ["84"]),
        ("172 reviews", "171 reviews", ["172"]),
        ("0.5, then 0.25", "0.5", ["0.25"]),
    ],
)
def test_a_number_that_no_cell_prints_is_told(text: str, printed: str, missing: list) -> None:
    assert unsupported_numbers(lesson(text, printed)) == missing


def test_numbers_in_a_cells_source_count() -> None:
    assert (
        unsupported_numbers(lesson("128 reviews, kl_coef 0.3", source="dict(n=128, k=0.3)")) == []
    )
