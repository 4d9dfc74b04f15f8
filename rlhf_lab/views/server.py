"""Server of the page about a run on this machine: local, with a token, read-only."""

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlhf_lab.errors import LabError
from rlhf_lab.probes import Run
from rlhf_lab.views.collect import collect_runs
from rlhf_lab.views.report import run_page
from rlhf_lab.views.side_by_side import runs_page

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
WATCHED = ("run.json", "*.jsonl", "probes/*.json*", "probes/records/*.jsonl", "returned/*.jsonl")
SECONDS = 10  # of a request
Response = tuple[str, str]  # type and content


def runs_version(runs: Sequence[Run]) -> str:
    """Return a text that changes when a file of a run does."""
    files = [file for run in runs for pattern in WATCHED for file in run.path.glob(pattern)]
    states = [file.stat() for file in files]
    return f"{len(states)}-{sum(s.st_size for s in states)}-{max(s.st_mtime_ns for s in states)}"


class PageCache:
    """The page of one or several runs, drawn again only if a file of a run has changed."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self.version, self.text = runs, "", ""
        self._lock = threading.Lock()

    def page(self) -> Response:
        """Return the page; the last one while a file is being written."""
        with self._lock:
            version = runs_version(self.runs)
            if version != self.version:
                try:
                    if len(self.runs) == 1:
                        self.text = run_page(self.runs[0], version)
                    else:
                        self.text = runs_page(collect_runs(self.runs), version)
                    self.version = version
                except LabError:
                    if not self.text:
                        raise
            return "text/html; charset=utf-8", self.text

    def state(self) -> Response:
        """Return the version of the files."""
        return "application/json", json.dumps({"version": runs_version(self.runs)})


class PageServer(ThreadingHTTPServer):
    """A server on 127.0.0.1 whose paths begin with a secret token.

    Args:
        pages: functions that return an answer, by the path after the token.
    """

    daemon_threads = True

    def __init__(self, pages: Mapping[str, Callable[[], Response]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages, self.token = pages, secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close a connection or send nothing."""


def view_server(run_paths: Sequence[str | Path]) -> PageServer:
    """Return a server of the page about one or several runs, which has been drawn once.

    Raises:
        RunError: If a path has no run, or one of its files is damaged.
    """
    runs = [Run(path) for path in run_paths]
    caches = {"": PageCache(runs)}
    caches[""].page()
    if len(runs) > 1:
        caches |= {f"{i}/": PageCache([run]) for i, run in enumerate(runs)}
    pages = {path: cache.page for path, cache in caches.items()}
    return PageServer(pages | {f"{path}state.json": c.state for path, c in caches.items()})


class _Handler(BaseHTTPRequestHandler):
    timeout = SECONDS
    server_version, sys_version = "rlhf_lab", ""
    error_message_format, error_content_type = "%(code)d", "text/plain"
    server: PageServer

    def do_GET(self) -> None:
        page = self._page()
        if page is None:
            return self.send_error(404)
        try:
            kind, text = page()
        except LabError:
            return self.send_error(500)
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _page(self) -> Callable[[], Response] | None:
        """Return the function of the path, or None if the request is not from our page."""
        port = self.server.server_port
        hosts = self.headers.get_all("Host") or []
        sites = self.headers.get_all("Sec-Fetch-Site") or ["none"]
        if len(hosts) != 1 or hosts[0] not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return None
        if sites not in (["none"], ["same-origin"]):
            return None
        _, token, *name = f"{self.path}//".split("/", 2)
        if not compare_digest(token.encode(), self.server.token.encode()):
            return None
        return self.server.pages.get(self.path.removeprefix(f"/{self.server.token}/"))

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write no log of requests."""
