"""The page about runs as one file: template, style, script and data, under a strict policy."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.views.interventions import N_TEXTS, SECONDS_PER_JOB
from rlhf_lab.views.marks import SVG_STYLE

SCRIPTS = ("data.js", "state.js", "samples.js", "token.js", "jobs.js", "live.js", "main.js")


def _read(*names: str) -> str:
    folder = files("rlhf_lab.views") / "web"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _policy(style: str, script: str, is_served: bool) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in (script, style))
    script, style = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    connect = "connect-src 'self'; " * is_served
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; {connect}"
        "base-uri 'none'; form-action 'none'"
    )


def assemble(
    name: str, state: str, body: str, header: Mapping[str, Any], blocks: Mapping[str, Any]
) -> str:
    """Return a document of HTML with JSON: the header, and compressed blocks read on first use."""
    packed = [
        f'<script type="text/plain" id="block-{escape(id)}">'
        f"{base64.b64encode(zlib.compress(_json(block).encode(), 9)).decode()}</script>"
        for id, block in blocks.items()
    ]
    style, script = f"{_read('page.css')}\n{SVG_STYLE}", _read(*SCRIPTS)
    return Template(_read("page.html")).substitute(
        policy=_policy(style, script, bool(header.get("version"))),
        name=escape(visible(name)),
        style=style,
        state=visible(state),
        body=visible(body),
        header=visible(_json(header).replace("<", "\\u003c")),
        blocks="\n".join(packed),
        script=script,
        n_texts=N_TEXTS,
        seconds=SECONDS_PER_JOB,
    )
