"""Staged sources of the site: its pages, and the files of the repository that they link to."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.site.api import write_api

FENCE = re.compile(r"^(```|~~~).*?^\1`*~*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
ELSEWHERE = re.compile(r"[a-z]+:")
CONTENTS = "docs/contents.md"  # tables of contents, which follow the README on the first page
FURTHER = ("CONTRIBUTING.md", "SECURITY.md")


def page_files(root: Path) -> list[Path]:
    """List the pages: all of docs/, the lessons, and two files of the root."""
    pages = [path for path in sorted((root / "docs").rglob("*.md")) if path != root / CONTENTS]
    lessons = sorted([*root.glob("notebooks/*.ipynb"), *root.glob("notebooks/more/*.ipynb")])
    return [*(root / name for name in FURTHER), *pages, *lessons]


def local_targets(text: str) -> Iterator[str]:
    """List the paths that a Markdown page links to, without anchors and code."""
    for pattern in (FENCE, CODE):
        text = pattern.sub(" ", text)
    for found in LINK.finditer(text):
        path = found[1].partition("#")[0]
        if path and not ELSEWHERE.match(path):
            yield path


def stage(root: Path, source: Path) -> None:
    """Write the sources of the site: pages, linked files as downloads, and API pages.

    Sphinx warns of links to files that do not exist, and of pages in no table of contents.
    """
    pages, readme = page_files(root), root / "README.md"
    _write(source / "index.md", f"{_read(root, readme)}\n{_read(root, root / CONTENTS)}")
    offered: set[Path] = set()
    for page in [readme, *pages]:
        if page.suffix != ".md":
            offered.add(page)
            continue
        targets = local_targets(page.read_text(encoding="utf-8"))
        linked = {(page.parent / target).resolve() for target in targets}
        offered |= {p for p in linked if p.is_file() and p.is_relative_to(root)}
        if page in pages:
            _write(source / page.relative_to(root), _read(root, page))
    for file in sorted(offered - {readme, *(p for p in pages if p.suffix == ".md")}):
        copy = source / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    write_api(source / "api")


def _read(root: Path, page: Path) -> str:
    """Read a page, with links to the README replaced by links to the first page."""
    up = "../" * (len(page.relative_to(root).parts) - 1)
    text = page.read_text(encoding="utf-8")
    return re.sub(rf"\]\({re.escape(up)}README\.md(#[^)]*)?\)", rf"]({up}index.md\1)", text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
