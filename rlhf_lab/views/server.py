"""Server of the page about a run on this machine: local, with a token; it only starts jobs."""

import json
import secrets
import threading
import warnings
from collections.abc import Sequence
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlhf_lab.errors import LabError
from rlhf_lab.probes import Run
from rlhf_lab.views.interventions import Jobs
from rlhf_lab.views.report import runs_page

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
WATCHED = ("run.json", "*.jsonl", "probes/*.json*", "probes/records/*.jsonl", "returned/*.jsonl")
WATCHED += ("interventions/*.json",)
LONGEST_POST = 4096  # bytes
Response = tuple[str, str]  # type and content
JSON = "application/json"


def runs_version(runs: Sequence[Run]) -> str:
    """Return a text that changes when a file of a run does."""
    states = [x.stat() for run in runs for pattern in WATCHED for x in run.path.glob(pattern)]
    return f"{len(states)}-{sum(s.st_size for s in states)}-{max(s.st_mtime_ns for s in states)}"


class PageCache:
    """The page of one or several runs, drawn again only if a file of a run has changed."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self.version, self.text, self._lock = runs, "", "", threading.Lock()
        self.jobs = Jobs(runs[0]) if len(runs) == 1 else None

    def page(self) -> Response:
        with self._lock:
            version = runs_version(self.runs)
            if version != self.version:
                try:
                    self.text, self.version = runs_page(self.runs, version), version
                except LabError as error:
                    if not self.text:
                        raise
                    warnings.warn(f"The page is not updated: {error}", stacklevel=2)
            return "text/html; charset=utf-8", self.text

    def state(self) -> Response:
        state = {} if self.jobs is None else self.jobs.state
        return JSON, json.dumps({"version": runs_version(self.runs), "job": dict(state)})


class PageServer(ThreadingHTTPServer):
    """A server on 127.0.0.1 of the page about one or several runs, under a secret token."""

    daemon_threads = True

    def __init__(self, run_paths: Sequence[str | Path]) -> None:
        runs = [Run(path) for path in run_paths]
        caches = {"": PageCache(runs)}
        caches[""].page()
        if len(runs) > 1:
            caches |= {f"{i}/": PageCache([run]) for i, run in enumerate(runs)}
        self.jobs = {f"{path}jobs": cache.jobs for path, cache in caches.items() if cache.jobs}
        self.pages = {path: cache.page for path, cache in caches.items()}
        self.pages |= {f"{path}state.json": cache.state for path, cache in caches.items()}
        self.token = secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def server_close(self) -> None:
        """Close the server, and cancel its jobs, which would continue without a time limit."""
        for jobs in self.jobs.values():
            jobs.post({"cancel": True})
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close a connection or send nothing."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds of a request
    server_version, sys_version = "rlhf_lab", ""
    error_message_format, error_content_type = "%(code)d", "text/plain"
    server: PageServer

    def do_GET(self) -> None:
        page = self.server.pages.get(self._name())
        if page is None:
            return self.send_error(404)
        try:
            self._send(200, *page())
        except LabError:
            self.send_error(500)

    def do_POST(self) -> None:
        jobs = self.server.jobs.get(self._name())
        length = self.headers.get("Content-Length", "")
        origins = self.headers.get_all("Origin") or []
        if jobs is None or origins != [f"http://{self.headers['Host']}"]:
            return self.send_error(404)
        if self.headers.get_all("Content-Type") != [JSON] or not length.isdecimal():
            return self.send_error(415)
        if int(length) > LONGEST_POST:
            return self.send_error(413)
        try:
            state = jobs.post(json.loads(self.rfile.read(int(length))))
        except (LabError, OSError, ValueError, RecursionError) as error:
            return self._send(400, JSON, json.dumps({"error": str(error)}))
        self._send(202, JSON, json.dumps(dict(state)))

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _name(self) -> str | None:
        """Return the path after the token, or None if the request is not from our page."""
        port = self.server.server_port
        hosts = self.headers.get_all("Host") or []
        sites = self.headers.get_all("Sec-Fetch-Site") or ["none"]
        if len(hosts) != 1 or hosts[0] not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return None
        if sites not in (["none"], ["same-origin"]):
            return None
        _, token, *name = self.path.split("/", 2)
        is_ours = bool(name) and compare_digest(token.encode(), self.server.token.encode())
        return name[0] if is_ours else None

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write no log of requests."""
