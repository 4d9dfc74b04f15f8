"""Sphinx events of the site: docstrings, references, formulas as MathML, and inline code."""

import inspect
import re
from collections.abc import Collection
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

from tools.site.public import public_paths, readable_signature, to_rst

LOG = logging.getLogger(__name__)
SEPARATORS = re.compile(r"(?<=[/_.=,])(?=\w)|(?<=::)")
SHORT = 16  # characters of code in a table that is not broken


def connect(app: Sphinx) -> None:
    """Register the events; docstrings are rewritten before napoleon parses their sections."""
    app.connect("autodoc-process-docstring", _rewrite_docstring, priority=100)
    app.connect("autodoc-process-signature", _rewrite_signature)
    app.connect("missing-reference", _resolve_to_room)
    app.connect("doctree-resolved", _process_inline_code)
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_block_formula, None))


def _rewrite_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = to_rst("\n".join(lines), _parameters(obj)).split("\n")


def _rewrite_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, *texts: str | None
) -> tuple[str | None, ...]:
    return tuple(None if text is None else readable_signature(text) for text in texts)


def _parameters(obj: Any) -> Collection[str]:
    try:
        return inspect.signature(obj).parameters.keys()
    except (TypeError, ValueError):
        return ()


def _resolve_to_room(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    path = public_paths().get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or path is None:
        return None
    python = env.domains["py"]
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contnode)


def _process_inline_code(app: Sphinx, doctree: nodes.document, page: str) -> None:
    if app.builder.format != "html":
        return
    for literal in list(doctree.findall(nodes.literal)):
        if not isinstance(literal.parent, nodes.reference | nodes.title):
            _link_to_api(app, literal, page)
    for table in doctree.findall(nodes.table):
        for literal in list(table.findall(nodes.literal)):
            _allow_breaks(literal)


def _link_to_api(app: Sphinx, literal: nodes.literal, page: str) -> None:
    """Link code such as `functional.masked_mean`, with or without the package's name."""
    name = literal.astext().removesuffix("()")
    if "." not in name:
        return
    known: dict[str, Any] = app.env.domains["py"].objects
    path = name if name.startswith("rlhf_lab") else f"rlhf_lab.{name}"
    found = known.get(public_paths().get(path, path))
    if found is None or found.docname == page:
        return
    target = f"{app.builder.get_relative_uri(page, found.docname)}#{found.node_id}"
    reference = nodes.reference("", "", internal=True, refuri=target)
    literal.parent.replace(literal, reference)
    reference += literal


def _allow_breaks(literal: nodes.literal) -> None:
    parts = [part for part in SEPARATORS.split(literal.astext()) if part]
    if len(literal.astext()) > SHORT and len(parts) > 1:
        broken = [(nodes.Text(part), nodes.raw("", "<wbr>", format="html")) for part in parts]
        literal.children = []
        literal += [node for pair in broken for node in pair][:-1]


def _inline_formula(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(_mathml(node, "inline"))
    raise nodes.SkipNode


def _block_formula(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(f'<div class="formula">{_mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def _mathml(node: nodes.math | nodes.math_block, display: str) -> str:
    formula = node.astext()
    try:
        found = convert(formula, display=display)
    except Exception as error:  # every fault of a formula has a separate class
        LOG.warning("formula %r: %s", formula, type(error).__name__, location=node)
        return ""
    if "\\" in found:
        LOG.warning("formula %r has a command that is not known", formula, location=node)
    return found
