"""Public names of the package: the names that each room exports, and their modules."""

import ast
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import rlhf_lab

MODULES = ("sampling", "sampling_spec", "samples", "errors")  # modules that are rooms themselves


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
        return [PublicName(n, room, room) for n in definitions(room) if not n.startswith("_")]
    return [PublicName(name, room, home) for name, home in _imports(room)]


def definitions(module: str) -> dict[str, ast.stmt]:
    """Return the functions, classes and constants of a module by name."""
    found: dict[str, ast.stmt] = {}
    for node in tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def text_after(module: str, name: str) -> str:
    """Return the comment on the lines of a constant or above it, else ""."""
    node, lines = definitions(module)[name], source(module).splitlines()
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
