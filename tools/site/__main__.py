"""The command `python -m tools.site`: sources staged, and built by Sphinx."""

import os
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as build_with_sphinx

from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from tools.site.staging import stage

CONF = Path(__file__).parent


def build(root: Path = Path("."), out: Path = Path("build/site")) -> int:
    """Write the site into OUT/html; status 1 if Sphinx warns, for example of a dead link.

    Args:
        root: root of the repository.
        out: directory of the site, with its staged sources.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    source, html = out.resolve() / "source", out.resolve() / "html"
    for directory in (source, html):
        shutil.rmtree(directory, ignore_errors=True)
    stage(root.resolve(), source)
    options = ["-b", "html", "-E", "-q", "-W", "-c", CONF, "-d", html.parent / "doctrees"]
    status = build_with_sphinx([str(x) for x in (*options, source, html)])
    pages = [p for p in html.rglob("*.html") if not p.relative_to(html).parts[0].startswith("_")]
    print_line(f"{len(pages)} pages, status {status}: {out / 'html' / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(run_program(build, "tools.site", description=__doc__))
