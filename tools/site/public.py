"""Public names of the package: what each room exports, and the module that defines it."""

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

MODULES = ("sampling", "sampling_spec", "samples", "errors")
"""The modules that are rooms by themselves; every package directly below the top is one."""


class PublicName(NamedTuple):
    """A name that a room exports.

    Args:
        room: the dotted name that people import it from.
        home: the dotted name of the module that defines it.
    """

    name: str
    room: str
    home: str

    @property
    def path(self) -> str:
        """What people write after `import`."""
        return f"{self.room}.{self.name}"

    @property
    def value(self) -> Any:
        """The object itself."""
        return getattr(importlib.import_module(self.room), self.name)


def rooms() -> list[str]:
    """The dotted names of all rooms."""
    packages = [m.name for m in pkgutil.iter_modules(rlhf_lab.__path__) if m.ispkg]
    return [f"rlhf_lab.{name}" for name in sorted([*packages, *MODULES])]


def public_names(room: str) -> list[PublicName]:
    """What a room exports, in the order of the modules that it imports from."""
    if room.removeprefix("rlhf_lab.") in MODULES:
        defined = definitions(room)
        return [PublicName(name, room, room) for name in defined if not name.startswith("_")]
    listed = _listed(room)
    found = (PublicName(name, room, home) for name, home in _imports(room))
    return [public for public in found if listed is None or public.name in listed]


def definitions(module: str) -> dict[str, ast.stmt]:
    """The functions, classes and constants of a module, by name."""
    found: dict[str, ast.stmt] = {}
    for node in tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def text_after(module: str, name: str) -> str:
    """Return the string below a constant, else the comment on its lines or above, else ""."""
    body, node = tree(module).body, definitions(module)[name]
    at = body.index(node) + 1
    following = body[at] if at < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return str(following.value.value)
    lines = source(module).splitlines()
    above, first, last = lines[node.lineno - 2], lines[node.lineno - 1], lines[node.end_lineno - 1]
    comments = [line.partition("  # ")[2] for line in (first, last)]
    comments += [above.removeprefix("# ")] if above.startswith("# ") else []
    return next(filter(None, comments), "")


def source(module: str) -> str:
    """Return the text of a module's file."""
    return Path(find_spec(module).origin).read_text(encoding="utf-8")


@functools.cache
def tree(module: str) -> ast.Module:
    """The syntax tree of a module's file."""
    return ast.parse(source(module))


def text_of(module: str) -> str:
    """The docstring of a module."""
    return ast.get_docstring(tree(module)) or ""


@functools.cache
def by_home() -> MappingProxyType[str, str]:
    """The public path of each public name, by the path where it is defined."""
    every = (public for room in rooms() for public in public_names(room))
    return MappingProxyType({f"{public.home}.{public.name}": public.path for public in every})


def _listed(module: str) -> list[str] | None:
    """What a module has in `__all__`; None where it has none."""
    node = definitions(module).get("__all__")
    return None if node is None else ast.literal_eval(node.value)


def _imports(room: str) -> Iterator[tuple[str, str]]:
    """Each name that a package imports from its own files, with the module that it is from."""
    for node in tree(room).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_lab"):
            for alias in node.names:
                if alias.name == "*":
                    yield from ((name, node.module) for name in _listed(node.module) or ())
                else:
                    yield alias.asname or alias.name, node.module
