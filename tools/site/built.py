"""Links of the built pages: each file and each anchor that an HTML page points to is there."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """What a page can be linked by, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.targets += [given[name] for name in ("href", "src") if given.get(name)]


def html_pages(html: Path) -> list[Path]:
    """The pages of a built site, without the files that it offers."""
    pages = sorted(html.rglob("*.html"))
    return [page for page in pages if not page.relative_to(html).parts[0].startswith("_")]


def dead_links(html: Path) -> list[str]:
    """A sentence for each link, picture, script or style of a page that leads nowhere."""
    pages = {path.resolve(): _read(path) for path in html.rglob("*.html")}
    problems = []
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchors = pages[file].anchors if file in pages else None
            if not file.is_file():
                problems.append(f"{path.relative_to(html)}: {target} is no file of the site.")
            elif url.fragment and anchors is not None and unquote(url.fragment) not in anchors:
                problems.append(f"{path.relative_to(html)}: {target} is no anchor of its page.")
    return problems


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page
