"""A small repository whose site builds in seconds, to plant faults in."""

from collections.abc import Callable
from pathlib import Path

import pytest

TABLE = "```{toctree}\n:hidden:\n\nThe first <docs/first>\ndocs/second\nnotebooks/00_lesson\n"
TABLE += "CONTRIBUTING\nSECURITY\napi/index\n```\n"
FILES = {
    "README.md": "# A project\n\nSee [the first](docs/first.md#a-part), [code](code.py).\n",
    "CONTRIBUTING.md": "# Contributing\n\nBack to the [start](README.md).\n",
    "SECURITY.md": "# Security\n\nNothing.\n",
    "code.py": "x = 1\n",
    "docs/contents.md": TABLE,
    "docs/first.md": "# First\n\n## A part\n\n[second](second.md), [start](../README.md)\n",
    "docs/second.md": "# Second\n\n`errors.LoadError`, [part](first.md#a-part) and [here](#end)\n\n"
    "## End\n\n![picture](picture.svg)\n\n```text\n[in code](nowhere.md)\n```\n",
    "docs/picture.svg": '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>\n',
}


@pytest.fixture
def repository(tmp_path) -> Callable[..., Path]:
    """A function that writes the small repository, with other texts for some of its files."""
    nbformat = pytest.importorskip("nbformat")

    def write(**changed: str) -> Path:
        root = tmp_path / "repository"
        text = "# 00 Lesson\n\nThe price $\\beta_1$ costs 5 dollars.\n\n$$\\sum_x \\pi(x) = 1$$"
        cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("1 / 0")]
        python = {"language_info": {"name": "python"}}
        lesson = nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=python))
        names = {name.replace("__", "/").replace("_md", ".md"): t for name, t in changed.items()}
        for name, text in (FILES | {"notebooks/00_lesson.ipynb": lesson} | names).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return root

    return write
