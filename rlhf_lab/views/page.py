"""The page about a run as one file: template, style, script and data, under a strict policy."""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.views.collect import pack
from rlhf_lab.views.jobs import N_TEXTS, SECONDS_PER_JOB
from rlhf_lab.views.marks import SVG_STYLE

SCRIPTS = ("data.js", "state.js", "samples.js", "token.js", "jobs.js", "live.js", "main.js")


def read_source(name: str) -> str:
    """Return a file of the folder `web`."""
    return (files("rlhf_lab.views") / "web" / name).read_text(encoding="utf-8")


def hashed(text: str) -> str:
    """Return the source expression of a content security policy for an inline element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def policy(style: str, script: str, is_served: bool = False) -> str:
    """Return a content security policy that allows this style and this script only."""
    connect = "connect-src 'self'; " if is_served else ""
    return (
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; "
        f"img-src data:; {connect}base-uri 'none'; form-action 'none'"
    )


def assemble(
    name: str, state: str, body: str, header: Mapping[str, Any], blocks: Mapping[str, Any]
) -> str:
    """Return a whole document.

    Args:
        name: of the run, the title.
        state: HTML that is shown next to the name.
        body: HTML of the sections.
        header: what the script reads first.
        blocks: what the script reads when it is shown, by id.
    """
    packed = [
        f'<script type="text/plain" id="block-{escape(id)}">{pack(block)}</script>'
        for id, block in blocks.items()
    ]
    style = "\n".join([read_source("page.css"), SVG_STYLE])
    script = "\n".join(map(read_source, SCRIPTS))
    first = json.dumps(header, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return Template(read_source("page.html")).substitute(
        policy=policy(style, script, bool(header.get("version"))),
        title=escape(visible(name)),
        name=escape(visible(name)),
        style=style,
        state=visible(state),
        body=visible(body),
        header=visible(first),
        blocks="\n".join(packed),
        script=script,
        n_texts=N_TEXTS,
        seconds=SECONDS_PER_JOB,
    )
