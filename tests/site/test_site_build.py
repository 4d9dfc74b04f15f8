"""The site of this repository, built in a real process: all its pages, names, lessons and links."""

import html
import importlib
import inspect
import json
import re

import pytest

from tests.site_build import BuiltSite, build_repository
from tools.prose import DOCS, ROOT, page, quoted, rows
from tools.site.public import rooms

pytestmark = [pytest.mark.process, pytest.mark.nightly]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> BuiltSite:
    return build_repository(tmp_path_factory.mktemp("site"))


def shown(source: str) -> str:
    """The text of a part of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", source))


def test_the_command_builds_without_a_warning(site):
    assert site.status == 0, site.output
    assert "WARNING" not in site.output and "ERROR" not in site.output
    assert site.pages == len(site.names()) > 50


def test_every_page_of_the_repository_is_a_page_of_the_site(site):
    docs = [path.relative_to(ROOT) for path in DOCS.rglob("*.md") if path.name != "contents.md"]
    lessons = [path.relative_to(ROOT) for path in ROOT.glob("notebooks/**/*.ipynb")]
    expected = {path.with_suffix(".html").as_posix() for path in [*docs, *lessons]}
    assert expected | {"index.html", "CONTRIBUTING.html", "api/index.html"} <= set(site.names())


def test_every_public_name_has_an_entry_with_its_docstring(site):
    pages = {name: site.page(name[:-5]) for name in site.names() if name.startswith("api/")}
    text = {name: " ".join(shown(source).split()) for name, source in pages.items()}
    counted = 0
    for room in rooms():
        module = importlib.import_module(room)
        found = {n: v for n, v in vars(module).items() if not n.startswith("_")}
        listed = {
            n for n, v in found.items() if f"{getattr(v, '__module__', '')}.".startswith(f"{room}.")
        }
        for name in sorted(listed):
            value = getattr(module, name)
            (there,) = [p for p, source in pages.items() if f'id="{room}.{name}"' in source]
            counted += 1
            if inspect.isfunction(value):
                first = inspect.getdoc(value).split("\n\n")[0]
                words = " ".join(re.sub(r"[`\\]", "", first).split())
                assert words[:60] in text[there], f"{room}.{name}"
    assert counted > 250


def test_lessons_are_shown_as_they_are_to_be_worked_through(site):
    """Every code cell stands there as in the notebook, unsolved and without outputs."""
    for path in ROOT.glob("notebooks/**/*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        source = site.page(path.relative_to(ROOT).with_suffix("").as_posix())
        blocks = re.findall(r'<div class="highlight-\w+ notranslate">(.*?)</pre>', source, re.S)
        text = [shown(block).strip() for block in blocks]
        assert [block for block in text if block in {c.strip() for c in code}] == [
            c.strip() for c in code if c.strip()
        ]
        assert "cell_output" not in source


def test_names_of_the_package_on_other_pages_lead_to_the_api(site):
    metrics = site.page("docs/metrics")
    link = 'href="../api/functional/kl.html#rlhf_lab.functional.calc_kl_penalty"'
    assert metrics.count(link) == page("metrics").count("`functional.calc_kl_penalty`") > 0
    here = {quoted(row[2])[0] for row in rows(page("metrics"), 3)}
    linked = {name for name in here if re.search(rf"#rlhf_lab\.{re.escape(name)}\"", metrics)}
    assert len(linked) > len(here) / 2


def test_no_page_needs_another_site(site):
    for name in site.names():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*src="([^"]+)"', site.page(name[:-5]))
        loaded += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="([^"]+)"', site.page(name[:-5]))
        assert loaded and not [url for url in loaded if url.startswith(("http:", "https:", "//"))]
