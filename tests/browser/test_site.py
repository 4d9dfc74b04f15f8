"""Every page of the site in a real browser: nothing missing, nothing too wide, light and dark."""

import contextlib
import functools
import http.server
import re
import threading
from collections.abc import Iterator

import pytest

from tests.site_build import BuiltSite, build_repository

LOOKED_AT = "index notebooks/02_the_objective docs/recipes/watch_activation docs/settings "
LOOKED_AT += "docs/metrics api/functional/kl api/training docs/features docs/results CONTRIBUTING"
SCREEN, TELEPHONE = {"width": 1280, "height": 900}, {"width": 400, "height": 900}
OVERFULL = """() => [...document.querySelectorAll('article *')].filter(el => {
  for (let box = el; box && box.tagName !== 'ARTICLE'; box = box.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(box).overflowX)) return false;
  return el.getBoundingClientRect().right > window.innerWidth + 1;
}).map(el => el.outerHTML.slice(0, 80))"""
BROKEN = """() => [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"""
NARROW = """() => [...document.querySelectorAll('article td')].filter(
  td => td.innerText.trim().length > 8 && td.getBoundingClientRect().width < 48
).map(td => td.innerText)"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(chromium, tmp_path_factory) -> BuiltSite:
    built = build_repository(tmp_path_factory.mktemp("site"))
    assert built.status == 0, built.output
    return built


@contextlib.contextmanager
def served(directory) -> Iterator[str]:
    """The address of a directory that is served on this machine."""
    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def opened(chromium, address: str, scheme: str) -> Iterator:
    """A page of a browser that reaches nothing but an address, with what goes wrong there."""
    context = chromium.new_context(color_scheme=scheme, viewport=SCREEN)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url))
    page.route(lambda url: not url.startswith((address, "data:")), lambda route: route.abort())
    yield page, wrong
    context.close()


def faults(page, legible) -> list[str]:
    """What a reader would see to be wrong on a page that is open."""
    found = [f"picture missing: {src}" for src in page.evaluate(BROKEN)]
    found += [f"too wide: {part}" for part in page.evaluate(OVERFULL)[:3]]
    found += [f"squeezed: {text}" for text in page.evaluate(NARROW)]
    for size in (TELEPHONE, SCREEN):
        page.set_viewport_size(size)
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            found.append(f"the page scrolls sideways at {size}")
    if not re.match(r"\S.* - rlhf_lab \d|rlhf_lab \d", page.title()):
        found.append(f"its title is {page.title()!r}")
    try:
        legible(page, "article")
    except AssertionError as pale:
        found.append(str(pale))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_whole_and_legible(chromium, site, legible, pictures, scheme):
    problems = []
    with served(site.html) as address, opened(chromium, address, scheme) as (page, wrong):
        for name in site.names():
            page.goto(f"{address}/{name}")
            if name == "search.html":
                page.goto(f"{address}/search.html?q=ratio")
                page.wait_for_selector("#search-results ul.search li")
            problems += [f"{name}: {part}" for part in [*faults(page, legible), *wrong]]
            wrong.clear()
            if name.removesuffix(".html") in LOOKED_AT.split():
                place = pictures / f"site_{name.replace('/', '_')[:-5]}_{scheme}.png"
                page.screenshot(path=place)
    assert not problems, "\n".join(problems)
