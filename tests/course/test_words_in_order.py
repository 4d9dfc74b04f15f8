"""Words of the first lessons: explained where docs/glossary.md says, and not used before."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import page, rows
from tools.course import builder

ROOT = Path(__file__).parents[2]
GLOSSARY = [(word, lesson) for word, _, lesson in rows(page("glossary").split("## ")[0], 3)]
MASTERS = [path for path in builder.masters(ROOT) if path.stem < "05"]


def text_of(master: Path) -> Iterator[str]:
    """The prose of a lesson behind its list of aims, cell by cell: without headings, the list of
    lessons to come, code, and formulas within a line. Words of displayed formulas count.
    """
    prose = [c.source for c in builder.solution_notebook(master).cells if c.cell_type == "markdown"]
    first = next(i for i, text in enumerate(prose) if re.search(r"^## ", text, re.MULTILINE))
    prose[first] = prose[first][prose[first].index("## ") :]
    for text in prose[first:]:
        text = re.sub(r"^(?:#|- \d\d ).*$", "", text, flags=re.MULTILINE)
        yield re.sub(r"`[^`]*`|\$[^$]*\$", "", text)


CELLS = [(master.stem[:2], text) for master in MASTERS for text in text_of(master)]


@pytest.mark.parametrize(("word", "lesson"), GLOSSARY)
def test_a_word_is_explained_before_it_is_used(word: str, lesson: str) -> None:
    used = re.compile(rf"\b{word}s?\b", re.IGNORECASE)
    explained = re.compile(rf"\*{word}s?\.?\*", re.IGNORECASE)
    number, text = next((n, text) for n, text in CELLS if used.search(text))
    assert number == lesson and explained.search(text), text
    assert explained.search(text).start() - 2 <= used.search(text).start(), text


def test_a_word_that_is_used_too_early_is_noticed() -> None:
    assert len(GLOSSARY) > 50
    with pytest.raises(AssertionError):
        test_a_word_is_explained_before_it_is_used("reader", "01")
    with pytest.raises(AssertionError):
        test_a_word_is_explained_before_it_is_used("verdict", "03")
