"""Docstrings as reStructuredText: names in backticks become links, all else is plain text."""

import ast
import functools
import re
from collections.abc import Collection
from pathlib import Path

import rlhf_lab
from tools.site.public import public_paths

SPAN = re.compile(r"(?<!`)(?P<role>(?::[\w:]+:)?)(?P<ticks>`+)(?P<text>.+?)(?P=ticks)", re.DOTALL)
MARKUP = re.compile(r"[\\*|]|(?<=\w)_(?!\w)")
# two errors with one condition, which napoleon takes for one
TWO_ERRORS = re.compile(r"^( +)(\w+), (\w+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
NAME = re.compile(r"(?!_\d)[A-Za-z_][\w.]*")


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


@functools.cache
def words_of_code() -> frozenset[str]:
    """List the identifiers of the package, and the words in its strings except docstrings."""
    words: set[str] = set()
    for file in Path(rlhf_lab.__file__).parent.rglob("*.py"):
        words |= {file.name, file.stem, file.parent.name}
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= set() if id(node) in docstrings else set(re.findall(r"\w+", node.value))
            names = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
            words |= {part for name in names if name for part in str(name).split(".")}
    return frozenset(words)


def unknown_names(text: str) -> list[str]:
    """List the names in backticks that do not occur in the code of the package."""
    spans = (span for span in SPAN.finditer(text) if span["ticks"] == "`" and not span["role"])
    paths = [span["text"].removesuffix("()") for span in spans]
    return [
        path
        for path in paths
        if NAME.fullmatch(path) and not set(path.strip(".").split(".")) <= words_of_code()
    ]
