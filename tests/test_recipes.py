"""The recipes in docs/recipes: each program runs and prints the output on its page."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
PAGES = sorted(path.stem for path in RECIPES.glob("*.md") if path.stem != "index")
assert len(PAGES) >= 8
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "text"}


class Step(NamedTuple):
    """Something that a reader runs, and what the page says it prints."""

    arguments: list[str]
    shown: str | None = None


def steps(page: str) -> list[Step]:
    """The programs and commands of a recipe, in its order."""
    found: list[Step] = []
    for language, body in BLOCK.findall(page):
        assert language in LANGUAGES, language
        if language == "python":
            found.append(Step(["-c", body]))
        elif language == "text":
            found[-1] = found[-1]._replace(shown=body)
        else:
            for line in body.splitlines():
                assert line.startswith("python "), line
                found.append(Step(shlex.split(line)[1:]))
    return found


def without_numbers(text: str) -> str:
    """What is printed with its numbers blanked, which differ from one processor to another."""
    return re.sub(r"\d+\.\d+", "N", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_recipe_runs_and_prints_what_its_page_shows(name, tmp_path, warm_python):
    text = (RECIPES / f"{name}.md").read_text(encoding="utf-8")
    if "from sae_lens import" in text and importlib.util.find_spec("sae_lens") is None:
        pytest.skip("SAELens is not installed; `pip install sae-lens` to run this recipe")
    found = steps(text)
    assert any(step.shown for step in found), "a recipe shows what it prints"
    for step in found:
        done = warm_python.run(step.arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if step.shown is not None:
            assert without_numbers(done.stdout) == without_numbers(step.shown)
