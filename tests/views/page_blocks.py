"""Runs in memory, and the tags and packed data of a page about a run."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Run

LOADING = ("applet", "base", "embed", "frame", "iframe", "link", "object")


class Page(HTMLParser):
    """Checks each tag of a page, and collects its text and links, and tags without an end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.links, self.open = "", [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in LOADING, tag
        for name, value in attributes:
            assert not name.startswith("on") and name != "src", (tag, name)
            assert name != "href" or value.startswith("#"), value
            assert name != "http-equiv" or value == "Content-Security-Policy"
            self.links += [value[1:]] if name == "href" else []
        self.open += [] if tag in ("meta", "input", "br", "img") else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class MemoryRun(Run):
    """A run without a directory."""

    path, args, info = Path("nowhere"), RLHFArgs(preset="reel"), {}

    def __init__(self, samples=(), metrics=(), info=None) -> None:
        self._samples, self._metrics, self.info = samples, metrics, info or {}

    def metrics(self) -> list[dict[str, Any]]:
        return list(self._metrics)

    def samples(self, phase: int | None = None) -> list[dict[str, Any]]:
        return [sample for sample in self._samples if phase in (None, sample["phase"])]


def read_blocks(page: str) -> dict[str, Any]:
    found = re.findall('<script type="text/plain" id="block-(.*?)">(.*?)</script>', page)
    return {id: json.loads(zlib.decompress(base64.b64decode(text))) for id, text in found}


def read_header(page: str) -> dict[str, Any]:
    return json.loads(re.search('id="header">(.*?)</script>', page)[1])
