"""Inline code of the pages: links from names of the package to the API, line breaks in tables."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from tools.site.public import by_home

SEPARATORS = re.compile(r"(?<=[/_.=,])(?=\w)|(?<=::)")
SHORT = 16
"""Characters that code in a table has before it may break, after a separator and not elsewhere."""


def connect(app: Sphinx) -> None:
    """Have Sphinx link the names and mark where the code in tables may break."""
    app.connect("doctree-resolved", _process)


def _process(app: Sphinx, doctree: nodes.document, page: str) -> None:
    if app.builder.format != "html":
        return
    for literal in list(doctree.findall(nodes.literal)):
        if not isinstance(literal.parent, nodes.reference | nodes.title):
            _link(app, literal, page)
    for table in doctree.findall(nodes.table):
        for literal in list(table.findall(nodes.literal)):
            _break(literal)


def _link(app: Sphinx, literal: nodes.literal, page: str) -> None:
    """Link code such as `functional.masked_mean`, with or without the package before it."""
    name = literal.astext().removesuffix("()")
    if "." not in name:
        return
    known: dict[str, Any] = app.env.domains["py"].objects
    path = name if name.startswith("rlhf_lab") else f"rlhf_lab.{name}"
    found = known.get(by_home().get(path, path))
    if found is None or found.docname == page:
        return
    target = f"{app.builder.get_relative_uri(page, found.docname)}#{found.node_id}"
    reference = nodes.reference("", "", internal=True, refuri=target)
    literal.parent.replace(literal, reference)
    reference += literal


def _break(literal: nodes.literal) -> None:
    parts = [part for part in SEPARATORS.split(literal.astext()) if part]
    if len(literal.astext()) <= SHORT or len(parts) == 1:
        return
    children: list[nodes.Node] = []
    for part in parts:
        children += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]
    literal.children = []
    literal += children[:-1]
