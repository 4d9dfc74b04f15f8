"""Numbers in the text of the lessons are those that their cells print or hold."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.course import builder
from tools.course.prose import unsupported_numbers

ROOT = Path(__file__).parents[2]
FROM_ELSEWHERE = {
    "00_start": ["900"],  # comparisons, in the paper that the sentence cites
    "02_the_value_head": ["20"],  # phases of a suggestion to try
    "05_the_objective": ["10,000", "640"],  # the setting's default, and a suggestion to try
    "07_what_breaks_it": ["0.02", "0.93"],  # on another kind of processor
    "08_watch_it_learn": ["87"],  # the volume of a journal
    "09_what_rlhf_changed": ["40"],  # a suggestion to try
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


def test_folded_text_is_not_compared() -> None:
    folded = "0.52\n<details><summary>What was found</summary>\n\n97 %, 0.61\n\n</details>"
    assert unsupported_numbers(lesson(folded)) == ["0.52"]


def test_numbers_in_a_cells_source_count() -> None:
    assert (
        unsupported_numbers(lesson("128 reviews, kl_coef 0.3", source="dict(n=128, k=0.3)")) == []
    )


DRAWN = '<svg><path d="M 0.52 201.3"/><text>17.5</text></svg>'


@pytest.mark.parametrize(
    "data",
    [
        {"text/plain": f"Picture(svg='{DRAWN}')", "text/html": '<img src="data:;base64,0.52"/>'},
        {"text/plain": "Picture()", "text/html": f"<div>{DRAWN}</div>"},
        {"text/plain": f"Picture(svg='{DRAWN}')"},
        {"text/plain": "Html()", "text/html": "<style>p {margin: 0.52em 17.5px}</style>"},
    ],
)
def test_numbers_that_draw_a_picture_are_not_printed_ones(data: dict) -> None:
    notebook = lesson("it earns 0.52, of 17.5")
    notebook.cells[1].outputs = [new_output("display_data", data=data)]
    assert unsupported_numbers(notebook) == ["0.52", "17.5"]


def test_a_tooltip_counts_as_printed() -> None:
    html = '<span style="color: #123" title="KL 0.521">dull</span>'
    notebook = lesson("a KL of 0.52")
    notebook.cells[1].outputs = [new_output("display_data", data={"text/html": html})]
    assert unsupported_numbers(notebook) == []


def test_a_result_is_printed_near_its_text_and_a_size_anywhere() -> None:
    far = [new_code_cell("", outputs=[new_output("stream", text="0.52 1536")])]
    between = [new_code_cell(f"step({i})") for i in range(7)]
    text = new_markdown_cell("0.52 of 1,536 reviews, so 52 %")
    assert unsupported_numbers(new_notebook(cells=[*far, *between, text])) == ["0.52", "52"]
    assert unsupported_numbers(new_notebook(cells=[*far, *between[:5], text])) == []
    assert unsupported_numbers(new_notebook(cells=[text, *between[:3], *far])) == []
    assert unsupported_numbers(new_notebook(cells=[text, *between[:4], *far])) == ["0.52", "52"]


SHOWN = ("bars", "curves", "heatmap", "heatmaps", "loop_diagram", "tokens_html", "color_key")


@pytest.mark.parametrize("master", builder.masters(ROOT), ids=lambda path: path.stem)
def test_every_figure_of_a_cell_is_shown(master: Path) -> None:
    """A notebook shows a cell's last value alone: a figure before it needs `display`."""
    unseen = [
        line
        for cell in nbformat.read(master.with_suffix(".ipynb"), as_version=4).cells
        if cell.cell_type == "code"
        for line in unseen_figures(cell.source)
    ]
    assert unseen == []


def unseen_figures(source: str) -> list[str]:
    """The statements before a cell's last one that draw something and hand it to nobody."""
    statements = ast.parse(re.sub(r"^( *)%.*$", r"\1pass", source, flags=re.MULTILINE)).body
    alone = [s.value for s in statements[:-1] if isinstance(s, ast.Expr)]
    calls = [value for value in alone if isinstance(value, ast.Call)]
    return [ast.unparse(c)[:60] for c in calls if ast.unparse(c.func).split(".")[-1] in SHOWN]


def test_a_figure_in_the_middle_of_a_cell_is_found() -> None:
    assert unseen_figures("x = 1\ncurves(x)\nprint(x)") == ["curves(x)"]
    assert unseen_figures("%magic\ndisplay(curves(x))\ncurves(x)") == []
