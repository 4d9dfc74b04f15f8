"""Docstrings as reStructuredText: names in backticks become links, and nothing else is markup."""

import ast
import functools
import re
from collections.abc import Collection
from pathlib import Path

import rlhf_lab
from tools.site.public import by_home

SPAN = re.compile(r"(?<!`)(?P<role>(?::[\w:]+:)?)(?P<ticks>`+)(?P<text>.+?)(?P=ticks)", re.DOTALL)
MARKUP = re.compile(r"[\\*|]|(?<=\w)_(?!\w)")
TWO_ERRORS = re.compile(r"^( +)(\w+), (\w+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
"""Two errors of one reason in a section of errors, which napoleon takes for one."""
NAME = re.compile(r"(?!_\d)[A-Za-z_][\w.]*")


def to_rst(text: str, own: Collection[str] = ()) -> str:
    """A docstring with its names as links or code, and every other mark of the markup escaped.

    Args:
        own: names that mean something else here, such as parameters; they are code, not links.
    """
    text, parts, end = TWO_ERRORS.sub(r"\1\2: \4\n\1\3: \4", text), [], 0
    for span in SPAN.finditer(text):
        parts += [MARKUP.sub(r"\\\g<0>", text[end : span.start()]), _span(span, own)]
        end = span.end()
    return "".join([*parts, MARKUP.sub(r"\\\g<0>", text[end:])])


def _span(span: re.Match, own: Collection[str]) -> str:
    """One name in backticks: a link where it is a public name of ours."""
    if span["role"] or len(span["ticks"]) > 1:
        return span[0]
    text = " ".join(span["text"].split())
    target = None if text in own else public_path(text.removesuffix("()"))
    return f":py:obj:`{text} <{target}>`" if target else f"``{text}``"


def readable_signature(text: str) -> str:
    """A signature without what Python prints for objects: `~a.b.C`, `<function f>`, `<factory>`."""
    text = re.sub(r"~(?:\w+\.)+(?=\w)", "", text)
    text = re.sub(r"<function (?:[\w<>]+\.)*(\w+)(?: at 0x\w+)?>", r"\1", text)
    return text.replace("<factory>", "...")


def public_path(name: str) -> str | None:
    """The path of the public name that a docstring means; None if it is none, or not just one."""
    paths = sorted(path for path in by_home().values() if f".{path}".endswith(f".{name}"))
    return paths[0] if len(set(map(_last, paths))) == 1 else None


def _last(path: str) -> str:
    return path.rpartition(".")[2]


@functools.cache
def words_of_code() -> frozenset[str]:
    """Every identifier and word in a string of the package, docstrings left out."""
    words: set[str] = set()
    for file in Path(rlhf_lab.__file__).parent.rglob("*.py"):
        words |= {file.name, file.stem, file.parent.name}
        tree = ast.parse(file.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= set() if id(node) in said else set(re.findall(r"\w+", node.value))
            fields = ("id", "attr", "arg", "name")
            names = (getattr(node, field, None) for field in fields)
            words |= {part for name in names if name for part in str(name).split(".")}
    return frozenset(words)


def unknown_names(text: str) -> list[str]:
    """Names in backticks that stand nowhere in the code of the package."""
    spans = (span for span in SPAN.finditer(text) if span["ticks"] == "`" and not span["role"])
    paths = [span["text"].removesuffix("()") for span in spans]
    return [
        path
        for path in paths
        if NAME.fullmatch(path) and not set(path.strip(".").split(".")) <= words_of_code()
    ]
