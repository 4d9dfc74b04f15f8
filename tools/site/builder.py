"""Build of the site: sources staged, Sphinx run in a process, warnings collected."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from tools.site.public import rooms as all_rooms
from tools.site.staging import stage

CONF = Path(__file__).parent
WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL|Error|Exception)\b")


class Built(NamedTuple):
    """Number of pages, duration, and a sentence for each problem."""

    pages: int
    seconds: float
    problems: list[str]


def build_site(root: Path, out: Path, rooms: Sequence[str] | None = None) -> Built:
    """Stage the pages of the repository, and build them into `out`/html with API pages of rooms."""
    start = perf_counter()
    source, html = out / "source", out / "html"
    for directory in (source, html):
        shutil.rmtree(directory, ignore_errors=True)
    stage(root, source, all_rooms() if rooms is None else rooms)
    problems = _run_sphinx(root, source, html)
    pages = [p for p in html.rglob("*.html") if not p.relative_to(html).parts[0].startswith("_")]
    return Built(len(pages), perf_counter() - start, problems)


def _run_sphinx(root: Path, source: Path, html: Path) -> list[str]:
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-E", "-q", "--keep-going", "-W"]
    command += ["-N", "-c", str(CONF), "-d", str(html.parent / "doctrees"), str(source), str(html)]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    output = (done.stdout + done.stderr).replace(f"{source}/", "")
    lines = [line for line in output.splitlines() if WARNING.search(line)]
    if done.returncode and not lines:
        return [f"Sphinx ended with status {done.returncode}: {output.strip() or 'no output'}"]
    return lines
