"""The repository's site, built by its command in a process, for the tests that read its pages."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.prose import ROOT


class BuiltSite(NamedTuple):
    html: Path
    pages: int
    output: str
    status: int

    def page(self, name: str) -> str:
        return (self.html / f"{name}.html").read_text(encoding="utf-8")

    def names(self) -> list[str]:
        """The addresses of all pages, without what Sphinx puts into folders of its own."""
        paths = (path.relative_to(self.html) for path in sorted(self.html.rglob("*.html")))
        return [path.as_posix() for path in paths if not path.parts[0].startswith("_")]


def build_repository(out: Path) -> BuiltSite:
    """Build the site as `make site` does, or skip if the extra docs is not installed."""
    for package in ("sphinx", "furo", "myst_nb", "latex2mathml"):
        pytest.importorskip(package, reason="the site needs the extra docs; run `make site`")
    command = [sys.executable, "-m", "tools.site", "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    output = done.stdout + done.stderr
    pages = re.search(r"(\d+) pages, ", output)
    return BuiltSite(out / "html", int(pages[1]) if pages else 0, output, done.returncode)
