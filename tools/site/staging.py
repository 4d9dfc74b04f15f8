"""Staged sources: a tree that mirrors the repository with only what the site shows or offers."""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.site.api import write_api

FENCE = re.compile(r"^(```|~~~).*?^\1`*~*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
ELSEWHERE = re.compile(r"[a-z]+:")
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)
HEAD = "README.md"
CONTENTS = "docs/contents.md"
"""What follows the README on the site's first page: the tables of contents, paths from the root."""
FURTHER = ("CONTRIBUTING.md", "SECURITY.md")


def page_files(root: Path) -> list[Path]:
    """The repository's files that are pages: all of docs/, the lessons, and what stands beside."""
    pages = [path for path in sorted((root / "docs").rglob("*.md")) if path != root / CONTENTS]
    lessons = sorted((root / "notebooks").glob("*.ipynb"))
    return [*(root / name for name in FURTHER), *pages, *lessons]


def links(text: str) -> Iterator[str]:
    """The targets of the links and images of a Markdown page, without those in code."""
    for pattern in (FENCE, CODE):
        text = pattern.sub(" ", text)
    yield from (found[1] for found in LINK.finditer(text))


def local_targets(text: str) -> Iterator[str]:
    """Those targets that are paths, without the anchor."""
    for target in links(text):
        path = target.partition("#")[0]
        if path and not ELSEWHERE.match(target):
            yield path


def contents(text: str) -> list[str]:
    """The entries of the tables of contents on a page, each a path with or without a title."""
    lines = (line.strip() for block in TOCTREE.findall(text) for line in block.splitlines())
    entries = (line for line in lines if line and not line.startswith(":"))
    return [re.sub(r"^.*<(.*)>$", r"\1", entry) for entry in entries]


def missing_from_contents(root: Path) -> list[str]:
    """The pages that no table of contents names, each with the line that it lacks."""
    named: set[str] = set()
    for page in [root / CONTENTS, *page_files(root)]:
        if page.suffix == ".md":
            for entry in contents(page.read_text(encoding="utf-8")):
                place = root if page == root / CONTENTS or entry.startswith("/") else page.parent
                path = (place / entry.lstrip("/")).resolve()
                named |= {str(match) for match in path.parent.glob(path.name + ".*")}
    left = [page for page in page_files(root) if str(page) not in named]
    entries = [page.relative_to(root).with_suffix("").as_posix() for page in left]
    return [
        f"{entry}{page.suffix} is in no table of contents; add the line {entry} to {CONTENTS}."
        for page, entry in zip(left, entries, strict=True)
    ]


def stage(root: Path, source: Path, rooms: Sequence[str]) -> list[str]:
    """Write the sources of the site, and say what is wrong with the links to files.

    The first page is the README with the tables of contents. A file that a page links to and that
    is no page itself is copied, and offered as a download.

    Args:
        root: the repository's root.
        source: the new directory.
        rooms: the rooms of the package that get API pages.
    """
    pages = page_files(root)
    problems = missing_from_contents(root)
    head, table = (_read(root, root / name) for name in (HEAD, CONTENTS))
    _write(source / "index.md", f"{head}\n{table}")
    offered: set[Path] = set()
    for page in [root / HEAD, *pages]:
        if page.suffix != ".md":
            offered.add(page)
            continue
        linked, wrong = linked_files(root, page)
        offered |= linked - {root / HEAD, *pages}
        problems += wrong
        if page in pages:
            _write(source / page.relative_to(root), _read(root, page))
    for file in sorted(offered):
        copy = source / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    write_api(source / "api", rooms)
    return problems


def linked_files(root: Path, page: Path) -> tuple[set[Path], list[str]]:
    """The repository's files that a page links to, and a sentence for each that is missing."""
    found, problems = set(), []
    for target in local_targets(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        name = page.relative_to(root).as_posix()
        if not path.is_file() or not path.is_relative_to(root):
            problems.append(f"{name} links to {target}, which is no file of the repository.")
        elif path.suffix == ".md" and path not in [root / HEAD, *page_files(root)]:
            problems.append(f"{name} links to {target}, which is no page of the site.")
        else:
            found.add(path)
    return found, problems


def _read(root: Path, page: Path) -> str:
    """A page's text, where a link to the README is one to the site's first page."""
    up = "../" * (len(page.relative_to(root).parts) - 1)
    text = page.read_text(encoding="utf-8")
    return re.sub(rf"\]\({re.escape(up)}README\.md(#[^)]*)?\)", rf"]({up}index.md\1)", text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
