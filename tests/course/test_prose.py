"""Numbers in the text of the lessons are printed by their cells, and figures are shown."""

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
    """Return a notebook of one text and one cell."""
    outputs = [new_output("stream", text=printed)] if printed else []
    return new_notebook(cells=[new_markdown_cell(text), new_code_cell(source, outputs=outputs)])


SVG = '<svg><path d="M 0.52 201.3"/></svg>'
FAR = [new_code_cell(f"step({i})") for i in range(7)]


@pytest.mark.parametrize(
    ("text", "printed", "missing"),
    [
        ("it reads 0.98 of it", "R2 0.9812", []),
        ("it reads 0.98 of it", "R2 0.9712", ["0.98"]),
        ("a drop of -1.25 nats", "-1.2471", []),
        ("84 % of the KL", "share 0.8391", []),
        ("84 % of the KL", "84%", []),
        ("84 % of the KL", "share 0.82", ["84"]),
        ("1,024 reviews", "1024", []),
        ("172 reviews", "171 reviews", ["172"]),
        ("two terms, 4 tokens, in 2019, `x = 77`, $x^{31}$, lesson 06", "", []),
        (
            "0.52\n<details><summary>What was found</summary>\n\n97 %, 0.61\n\n</details>",
            "",
            ["0.52"],
        ),
    ],
)
def test_unsupported_numbers_are_those_that_no_cell_prints(text, printed, missing) -> None:
    assert unsupported_numbers(lesson(text, printed)) == missing


def test_unsupported_numbers_ignores_drawings() -> None:
    source = "dict(n=128, k=0.3)"
    assert unsupported_numbers(lesson("128 reviews, kl_coef 0.3", source=source)) == []
    notebook = lesson("a KL of 0.52")
    for html, missing in (('<span title="KL 0.521">dull</span>', []), (SVG, ["0.52"])):
        notebook.cells[1].outputs = [new_output("display_data", data={"text/html": html})]
        assert unsupported_numbers(notebook) == missing


def test_unsupported_numbers_looks_for_results_near_the_text() -> None:
    result = [new_code_cell("", outputs=[new_output("stream", text="0.52 1536")])]
    text = new_markdown_cell("0.52 of 1,536 reviews")
    for cells, missing in (
        ([*result, *FAR[:5], text], []),
        ([*result, *FAR, text], ["0.52"]),
        ([text, *FAR[:3], *result], []),
        ([text, *FAR[:4], *result], ["0.52"]),
    ):
        assert unsupported_numbers(new_notebook(cells=cells)) == missing


DRAWING = ("bars", "curves", "heatmap", "heatmaps", "loop_diagram", "tokens_html", "color_key")


@pytest.mark.parametrize("master", builder.masters(ROOT), ids=lambda path: path.stem)
def test_every_figure_of_a_cell_is_shown(master: Path) -> None:
    """A notebook shows only a cell's last value: a figure before it needs `display`."""
    unseen = [
        line
        for cell in nbformat.read(master.with_suffix(".ipynb"), as_version=4).cells
        if cell.cell_type == "code"
        for line in unseen_figures(cell.source)
    ]
    assert unseen == []


def unseen_figures(source: str) -> list[str]:
    """Return the calls before a cell's last statement that draw something unseen."""
    statements = ast.parse(re.sub(r"^( *)%.*$", r"\1pass", source, flags=re.MULTILINE)).body
    alone = [s.value for s in statements[:-1] if isinstance(s, ast.Expr)]
    calls = [value for value in alone if isinstance(value, ast.Call)]
    return [ast.unparse(c)[:60] for c in calls if ast.unparse(c.func).split(".")[-1] in DRAWING]


def test_a_figure_in_the_middle_of_a_cell_is_found() -> None:
    assert unseen_figures("x = 1\ncurves(x)\nprint(x)") == ["curves(x)"]
    assert unseen_figures("%magic\ndisplay(curves(x))\ncurves(x)") == []
