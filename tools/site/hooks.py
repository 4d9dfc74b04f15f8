"""Sphinx events of the site: docstrings rewritten, references led to the rooms."""

import inspect
from collections.abc import Collection
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

from tools.site.docstrings import readable_signature, to_rst, unknown_names
from tools.site.public import by_home

LOG = logging.getLogger(__name__)
NOT_OURS = [
    (r"py:(class|exc|data)", r"(?!rlhf_lab\b).*"),
    (r"py:obj", r"(None|True|False|collections|jaxtyping|numpy|torch|typing)\b.*"),
    (r"py:class", r"rlhf_lab\.(?!errors\b).*"),
]
"""References that lead nowhere without a fault: other packages, and types that no room exports."""


def connect(app: Sphinx) -> None:
    """Have Sphinx read docstrings this way, before napoleon takes their sections apart."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    app.connect("autodoc-process-signature", _sign)
    app.connect("missing-reference", _resolve)


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place, as autodoc asks; a name that is nowhere is a warning."""
    text = "\n".join(lines)
    for unknown in unknown_names(text):
        LOG.warning("docstring of %s names `%s`, which is nowhere in the code", name, unknown)
    lines[:] = to_rst(text, _parameters(obj)).split("\n")


def _sign(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    given: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """A signature as it is written in the code: short names of types, functions by their names."""
    return tuple(None if text is None else readable_signature(text) for text in (given, returned))


def _parameters(obj: Any) -> Collection[str]:
    """The names of what a function or a class takes."""
    try:
        return inspect.signature(obj).parameters.keys()
    except (TypeError, ValueError):
        return ()


def _resolve(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """A reference to the place where a public name is defined leads to its room."""
    path = by_home().get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or path is None:
        return None
    python = env.domains["py"]
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contnode)
