"""The lint of prose finds numbers, plots and names."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.course.prose import unsupported_numbers
from tools.prose import exists, unseen_plots


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
        ("an R2 of E_R2, with `SETTINGS_A` and $W_U$", "R2 0.98", ["E_R2"]),
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


def test_unseen_plots_are_those_before_the_last_statement() -> None:
    assert unseen_plots("x = 1\ncurves(x)\nprint(x)") == ["curves(x)"]
    assert unseen_plots("%magic\ndisplay(curves(x))\ncurves(x)") == []


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("functional.kl_estimate", True),
        ("functional.kl_guess", False),
        ("nowhere.kl_estimate", False),
        ("training.Rollout.ref_logprobs", True),
        ('RLHFArgs.kl_in="reward"', True),
        ('RLHFArgs.kl_in="rewards"', False),
        ("RLHFArgs.kl_out", False),
        ("python -m rlhf_lab sample --seed", True),
        ("python -m rlhf_lab sample --weather", False),
        ("python -m rlhf_lab sampel", False),
    ],
)
def test_exists_is_true_for_commands_fields_and_paths(name, is_known) -> None:
    assert exists(name) == is_known
