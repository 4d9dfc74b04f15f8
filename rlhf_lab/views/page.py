"""The page about runs as one file: template, style, script and data, under a strict policy."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.views.interventions import N_TEXTS, SECONDS_PER_JOB
from rlhf_lab.views.marks import SVG_STYLE
from rlhf_lab.views.templates import read_web, render

SCRIPTS = ("data.js", "state.js", "samples.js", "token.js", "jobs.js", "live.js", "main.js")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _packed(block: Any) -> str:
    return base64.b64encode(zlib.compress(_json(block).encode(), 9)).decode()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def assemble(header: Mapping[str, Any], blocks: Mapping[str, Any], **content: Any) -> str:
    """Return a document of HTML with JSON: the header, and compressed blocks read on first use."""
    style, script = f"{read_web('page.css')}\n{SVG_STYLE}", read_web(*SCRIPTS)
    page = render(
        "page.html",
        style=style,
        script=script,
        digests={"style": _digest(style), "script": _digest(script)},
        header=_json(header).replace("<", "\\u003c"),
        blocks={id: _packed(block) for id, block in blocks.items()},
        n_texts=N_TEXTS,
        seconds=SECONDS_PER_JOB,
        **content,
    )
    return visible(page)
