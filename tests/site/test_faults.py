"""Faults of pages, each named by the build of a small repository's site."""

import re
import subprocess
import sys

import pytest

from tools.prose import ROOT

pytest.importorskip("furo", reason="the site needs the extra docs; run `make site`")
pytestmark = [pytest.mark.process, pytest.mark.nightly]
BUILD = """
import sys
from pathlib import Path
from tools.site.builder import build_site
built = build_site(Path(sys.argv[1]), Path(sys.argv[2]), ["rlhf_lab.errors"])
print(built.pages, *built.problems, sep="\\n")
"""
FAULTS = {
    "'nowhere.md'": "[x](nowhere.md)",
    "docs/gone.png": "![x](gone.png)",
    "'../../../outside.md'": "[x](../../../outside.md)",
    "'no-such-anchor'": "[x](#no-such-anchor)",
    "'docs/second': 'no-such-part'": "[x](second.md#no-such-part)",
    "no_such_page": "```{toctree}\n:hidden:\n\nno_such_page\n```",
    "Pygments lexer name 'pyhton'": "```pyhton\nx = 1\n```",
    "Non-consecutive header level": "#### Deep",
    "rlhf_lab.errors.NoSuchError": "{py:class}`rlhf_lab.errors.NoSuchError`",
    "reference target not found: nope": "{py:func}`nope`",
    "Unknown interpreted text role": "{nosuchrole}`x`",
    "unlisted/README.md: WARNING: document isn't included": "[x](../unlisted/README.md)",
    r"formula '\\nosuch' has a command that is not known": r"$\nosuch$",
    r"formula '\\left( x': ExtraLeftOrMissingRightError": r"$\left( x$",
}


def built(root, out) -> tuple[int, list[str]]:
    """The number of pages that a build makes, and its problems."""
    command = [sys.executable, "-c", BUILD, str(root), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pages, *problems = done.stdout.splitlines()
    return int(pages), problems


def test_a_repository_without_faults_has_a_site_without_warnings(repository, tmp_path):
    pages, problems = built(repository(), tmp_path / "site")
    assert problems == []
    html = tmp_path / "site" / "html"
    first = (html / "index.html").read_text()
    # Of ours: start, two pages, a lesson, contributing, security, two of the API; of Sphinx: the
    # indices and the search.
    assert pages == 8 + len(list(html.glob("*index.html"))) - 1 + 1
    assert 'href="docs/first.html#a-part"' in first and "code.py" in first
    assert list(html.glob("_downloads/*/code.py"))
    assert 'href="../index.html"' in (html / "docs/first.html").read_text()
    second = (html / "docs/second.html").read_text()
    assert 'href="../api/errors.html#rlhf_lab.errors.LoadError"' in second
    lesson = (html / "notebooks/00_lesson.html").read_text()
    assert "ZeroDivisionError" not in lesson
    assert lesson.count("<math ") == 2 and "$" not in re.sub("<script.*?</script>", "", lesson)
    assert re.search(r'<div class="formula"><math [^>]*display="block"', lesson)
    assert "<msub><mi>&#x003B2;</mi><mn>1</mn></msub>" in lesson


def test_every_planted_fault_is_named(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = "# First\n\n## A part\n\n" + "\n\n".join(FAULTS.values()) + "\n"
    root = repository(docs__first_md=text, docs__new_md="# New\n\nA page.\n")
    (root / "unlisted").mkdir()
    (root / "unlisted/README.md").write_text("x")
    _, problems = built(root, tmp_path / "site")
    unnamed = [fault for fault in FAULTS if not any(fault in problem for problem in problems)]
    assert not unnamed, problems
    assert any(p.startswith("docs/new.md: WARNING: document isn't included") for p in problems)
