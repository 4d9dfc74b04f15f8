"""Docstrings as reStructuredText: names in backticks become links, all else is plain text."""

import re
from collections.abc import Collection

from tools.site.public import public_paths

SPAN = re.compile(r"(?<!`)(?P<role>(?::[\w:]+:)?)(?P<ticks>`+)(?P<text>.+?)(?P=ticks)", re.DOTALL)
MARKUP = re.compile(r"[\\*|]|(?<=\w)_(?!\w)")
# two errors with one condition, which napoleon takes for one
TWO_ERRORS = re.compile(r"^( +)(\w+), (\w+): (.*(?:\n\1 +.*)*)", re.MULTILINE)


def to_rst(text: str, parameters: Collection[str] = ()) -> str:
    """Convert a docstring: link names, except of parameters, and escape all other markup."""
    text, parts, end = TWO_ERRORS.sub(r"\1\2: \4\n\1\3: \4", text), [], 0
    for span in SPAN.finditer(text):
        parts += [MARKUP.sub(r"\\\g<0>", text[end : span.start()]), _link(span, parameters)]
        end = span.end()
    return "".join([*parts, MARKUP.sub(r"\\\g<0>", text[end:])])


def _link(span: re.Match, parameters: Collection[str]) -> str:
    if span["role"] or len(span["ticks"]) > 1:
        return span[0]
    text = " ".join(span["text"].split())
    name = text.removesuffix("()")
    paths = sorted(path for path in public_paths().values() if f".{path}".endswith(f".{name}"))
    is_unique = len({path.rpartition(".")[2] for path in paths}) == 1
    return (
        f":py:obj:`{text} <{paths[0]}>`" if is_unique and text not in parameters else f"``{text}``"
    )


def readable_signature(text: str) -> str:
    """Shorten what Python prints for objects: `~a.b.C`, `<function f>`, `<factory>`."""
    text = re.sub(r"~(?:\w+\.)+(?=\w)", "", text)
    text = re.sub(r"<function (?:[\w<>]+\.)*(\w+)(?: at 0x\w+)?>", r"\1", text)
    return text.replace("<factory>", "...")
