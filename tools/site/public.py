"""Public names of the package: their rooms and modules, and docstrings with links to them."""

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import rlhf_lab

MODULES = ("sampling", "sampling_spec", "samples", "errors")  # modules that are rooms themselves
SPAN = re.compile(r"(?<!`)(?P<role>(?::[\w:]+:)?)(?P<ticks>`+)(?P<text>.+?)(?P=ticks)", re.DOTALL)
MARKUP = re.compile(r"[\\*|]|(?<=\w)_(?!\w)")
# two errors with one condition, which napoleon takes for one
TWO_ERRORS = re.compile(r"^( +)(\w+), (\w+): (.*(?:\n\1 +.*)*)", re.MULTILINE)


class PublicName(NamedTuple):
    """A name, the room that exports it, and the module that defines it."""

    name: str
    room: str
    home: str

    @property
    def path(self) -> str:
        """Dotted path of the import."""
        return f"{self.room}.{self.name}"

    @property
    def value(self) -> Any:
        """The object."""
        return getattr(importlib.import_module(self.room), self.name)


def rooms() -> list[str]:
    """List the dotted names of all rooms."""
    packages = [m.name for m in pkgutil.iter_modules(rlhf_lab.__path__) if m.ispkg]
    return [f"rlhf_lab.{name}" for name in sorted([*packages, *MODULES])]


def public_names(room: str) -> list[PublicName]:
    """List the exports of a room, in the order of its imports."""
    if room.removeprefix("rlhf_lab.") in MODULES:
        names = definitions(tree(room))
        return [PublicName(n, room, room) for n in names if not n.startswith("_")]
    return [PublicName(name, room, home) for name, home in _imports(room)]


def definitions(module: ast.Module) -> dict[str, ast.stmt]:
    """Return the functions, classes and constants of a module by name."""
    found: dict[str, ast.stmt] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def text_after(module: str, name: str) -> str:
    """Return the comment on the lines of a constant or above it, else ""."""
    node, lines = definitions(tree(module))[name], source(module).splitlines()
    above, first, last = lines[node.lineno - 2], lines[node.lineno - 1], lines[node.end_lineno - 1]
    comments = [line.partition("  # ")[2] for line in (first, last)]
    comments += [above.removeprefix("# ")] if above.startswith("# ") else []
    return next(filter(None, comments), "")


def source(module: str) -> str:
    """Return the text of a module's file."""
    return Path(find_spec(module).origin).read_text(encoding="utf-8")


@functools.cache
def tree(module: str) -> ast.Module:
    """Parse a module's file."""
    return ast.parse(source(module))


@functools.cache
def public_paths() -> MappingProxyType[str, str]:
    """Return the public path of each public name, by the path of its definition."""
    every = (public for room in rooms() for public in public_names(room))
    return MappingProxyType({f"{public.home}.{public.name}": public.path for public in every})


def _imports(room: str) -> Iterator[tuple[str, str]]:
    for node in tree(room).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_lab"):
            yield from ((alias.asname or alias.name, node.module) for alias in node.names)


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
