"""The site of this repository, built in a process: pages, names, and layout in a browser."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.prose import DOCS, ROOT

pytestmark = [pytest.mark.process, pytest.mark.nightly]
SCREEN, TELEPHONE = {"width": 1280, "height": 900}, {"width": 400, "height": 900}
OVERFULL = """() => [...document.querySelectorAll('article *')].filter(el => {
  for (let box = el; box && box.tagName !== 'ARTICLE'; box = box.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(box).overflowX)) return false;
  return el.getBoundingClientRect().right > window.innerWidth + 1;
}).map(el => 'too wide: ' + el.outerHTML.slice(0, 80))"""
BROKEN = "() => [...document.images].filter(i => !i.naturalWidth).map(i => 'missing: ' + i.src)"


class Site(NamedTuple):
    html: Path
    output: str
    status: int

    def page(self, name: str) -> str:
        return (self.html / name).read_text(encoding="utf-8")

    def names(self) -> list[str]:
        """Return the addresses of all pages, without those in folders of Sphinx."""
        paths = (path.relative_to(self.html) for path in sorted(self.html.rglob("*.html")))
        return [path.as_posix() for path in paths if not path.parts[0].startswith("_")]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """The site as `make site` builds it; the tests are skipped without the extra docs."""
    for package in ("sphinx", "furo", "myst_nb", "latex2mathml"):
        pytest.importorskip(package, reason="the site needs the extra docs; run `make site`")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools.site", "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return Site(out / "html", done.stdout + done.stderr, done.returncode)


def test_command_builds_every_page_without_a_warning(site):
    assert site.status == 0, site.output
    assert "WARNING" not in site.output and "ERROR" not in site.output
    lessons = [*ROOT.glob("notebooks/**/*.ipynb")]
    docs = [path for path in DOCS.rglob("*.md") if path.name != "contents.md"]
    pages = {x.relative_to(ROOT).with_suffix(".html").as_posix() for x in [*docs, *lessons]}
    assert pages | {"index.html", "CONTRIBUTING.html", "api/index.html"} <= set(site.names())
    assert not any("cell_output" in site.page(name) for name in pages)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_whole_and_legible(chromium, site, legible, scheme):
    """Nothing is loaded from elsewhere, missing, or wider than the screen."""
    view, problems = chromium.new_page(color_scheme=scheme), []
    view.on("console", lambda message: problems.append(f"{view.url}: {message.text}"))
    view.on("pageerror", lambda error: problems.append(f"{view.url}: {error}"))
    view.on("requestfailed", lambda request: problems.append(f"{view.url}: {request.url}"))
    handler = functools.partial(Quiet, directory=str(site.html))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        view.route(lambda url: not url.startswith((address, "data:")), lambda route: route.abort())
        for name in site.names():
            view.goto(f"{address}/{name}")
            if name == "search.html":
                view.goto(f"{address}/search.html?q=ratio")
                view.wait_for_selector("#search-results ul.search li")
            for size in (TELEPHONE, SCREEN):
                view.set_viewport_size(size)
                if view.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                    problems.append(f"{name} scrolls sideways at {size}")
            found = view.evaluate(BROKEN) + view.evaluate(OVERFULL)
            problems += [f"{name}: {problem}" for problem in found]
            legible(view, "article")
        server.shutdown()
    view.close()
    assert not problems, "\n".join(problems)
