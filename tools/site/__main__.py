"""The command `python -m tools.site`: sources staged, Sphinx run in a process, warnings listed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from tools.site.staging import stage

CONF = Path(__file__).parent
WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL|Error|Exception)\b")


def build(root: Path = Path("."), out: Path = Path("build/site")) -> int:
    """Write the site into OUT/html; status 1 if Sphinx warns, for example of a dead link.

    Args:
        root: root of the repository.
        out: directory of the site, with its staged sources.
    """
    start, root = perf_counter(), root.resolve()
    source, html = out.resolve() / "source", out.resolve() / "html"
    for directory in (source, html):
        shutil.rmtree(directory, ignore_errors=True)
    stage(root, source)
    problems = _run_sphinx(root, source, html)
    for problem in problems:
        print_line(problem)
    pages = [p for p in html.rglob("*.html") if not p.relative_to(html).parts[0].startswith("_")]
    print_line(
        f"{len(pages)} pages, {len(problems)} warnings, {perf_counter() - start:.0f} s: "
        f"{out / 'html' / 'index.html'}"
    )
    return 1 if problems else 0


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(build, "tools.site", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
