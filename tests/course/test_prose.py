"""The lint of prose finds numbers, plots and names."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.course.prose import unsupported_numbers
from tools.prose import exists


def lesson(text: str, printed: str = "", source: str = "") -> nbformat.NotebookNode:
    """Return a notebook of one text and one cell."""
    outputs = [new_output("stream", text=printed)] if printed else []
    return new_notebook(cells=[new_markdown_cell(text), new_code_cell(source, outputs=outputs)])


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
        ("0.52\n<details><summary>Found</summary>\n\n97 %, 0.61\n\n</details>", "", ["0.52"]),
    ],
)
def test_unsupported_numbers_are_those_that_no_cell_prints(text, printed, missing) -> None:
    assert unsupported_numbers(lesson(text, printed)) == missing


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("functional.kl_guess", False),
        ("nowhere.kl_estimate", False),
        ('RLHFArgs.kl_in="reward"', True),
        ('RLHFArgs.kl_in="rewards"', False),
        ("RLHFArgs.kl_out", False),
        ("python -m rlhf_lab sample --weather", False),
        ("python -m rlhf_lab sampel", False),
    ],
)
def test_exists_is_true_for_commands_fields_and_paths(name, is_known) -> None:
    assert exists(name) == is_known
