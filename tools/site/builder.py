"""The build of the site: sources staged, Sphinx run in a process, built pages checked."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from tools.site.built import dead_links, html_pages
from tools.site.public import rooms as every_room
from tools.site.staging import stage

CONF = Path(__file__).parent
WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL|Error|Exception)\b")


class Built(NamedTuple):
    """What a build has made, and everything that is wrong with it, a sentence each."""

    pages: int
    seconds: float
    problems: list[str]


def build_site(root: Path, out: Path, rooms: Sequence[str] | None = None) -> Built:
    """Stage the repository's pages and build them into `out`/html, from nothing.

    Args:
        root: the repository's root.
        out: the directory of the site; what an earlier build left there is replaced.
        rooms: the rooms of the package that get API pages; all when None.
    """
    start = perf_counter()
    source, html = out / "source", out / "html"
    for place in (source, html):
        shutil.rmtree(place, ignore_errors=True)
    problems = stage(root, source, every_room() if rooms is None else rooms)
    problems += _sphinx(root, source, html)
    pages = html_pages(html)
    problems += dead_links(html)
    return Built(len(pages), perf_counter() - start, problems)


def _sphinx(root: Path, source: Path, html: Path) -> list[str]:
    """Run Sphinx over the staged sources; what it warns of, with paths as in the repository."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-E", "-q", "--keep-going", "-W"]
    command += ["-c", str(CONF), "-d", str(html.parent / "doctrees"), str(source), str(html)]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = (done.stdout + done.stderr).replace(f"{source}/", "")
    lines = [line for line in said.splitlines() if WARNING.search(line)]
    if done.returncode and not lines:
        return [f"Sphinx ended with status {done.returncode}: {said.strip() or 'no output'}"]
    return lines
