"""API pages in reStructuredText: one for each room, its names by the module that defines them."""

import ast
import inspect
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tools.site.docstrings import to_rst
from tools.site.public import PublicName, definitions, public_names, text_after, text_of

SPLIT = frozenset({"rlhf_lab.functional"})
"""Rooms with a page for each of their modules."""
WITHOUT_SIGNATURE = frozenset({"RLHFArgs"})
"""What has more parameters than anybody reads in a row; they are on the page of settings."""
LONGEST_VALUE = 300
START = """API
===

Every name that a room of the package exports, from the docstrings. ``functional`` is the
mathematics; the trainer is in ``training``, and its settings have a page of their own.

"""


def write_api(place: Path, rooms: Sequence[str]) -> None:
    """Write the pages of some rooms, given by their dotted names, into a new directory."""
    place.mkdir(parents=True)
    entries = []
    for room in rooms:
        short = room.removeprefix("rlhf_lab.")
        if room in SPLIT:
            (place / short).mkdir()
            modules = _split_room(room, place / short)
            text = _head(room) + "\n" + _toctree(modules)
            (place / short / "index.rst").write_text(text, encoding="utf-8")
            entries.append(f"{short}/index")
        else:
            (place / f"{short}.rst").write_text(_room(room), encoding="utf-8")
            entries.append(short)
    (place / "index.rst").write_text(START + _toctree(entries), encoding="utf-8")


def _split_room(room: str, place: Path) -> list[str]:
    """Write a page for each module that a room exports from; returns their names."""
    names = []
    for home, publics in _by_home(room):
        names.append(home.rpartition(".")[2])
        parts = [_head(home), *map(_entry, publics)]
        (place / f"{names[-1]}.rst").write_text("\n".join(parts), encoding="utf-8")
    return names


def _room(room: str) -> str:
    parts = [_head(room)]
    for home, publics in _by_home(room):
        if home != room:
            title = home.removeprefix(f"{room}.").removeprefix("rlhf_lab.").replace("_", " ")
            parts += [f"{title}\n{'-' * len(title)}\n", _first(home) + "\n"]
        parts += map(_entry, publics)
    return "\n".join(parts)


def _by_home(room: str) -> list[tuple[str, list[PublicName]]]:
    found = sorted(public_names(room), key=lambda public: public.home)
    return [(home, list(group)) for home, group in groupby(found, lambda public: public.home)]


def _head(module: str) -> str:
    """The title of a page, and what the module says about itself."""
    title = module.removeprefix("rlhf_lab.")
    said = to_rst(text_of(module))
    return f"{title}\n{'=' * len(title)}\n\n.. py:module:: {module}\n\n{said}\n"


def _first(module: str) -> str:
    """The first sentence of a module's docstring."""
    said = text_of(module)
    return to_rst(said.split("\n\n")[0])


def _entry(public: PublicName) -> str:
    """The directive that documents a name."""
    value = public.value
    if inspect.isclass(value):
        text = f".. autoclass:: {public.path}\n   :members:\n"
        if fields := getattr(value, "_fields", ()):  # a named tuple's, which its signature has
            text += f"   :exclude-members: {', '.join(fields)}\n"
        if public.name in WITHOUT_SIGNATURE:
            text = text.replace(public.path, f"{public.path}()")
        return text
    if inspect.isfunction(value):
        return f".. autofunction:: {public.path}\n"
    node = definitions(public.home)[public.name]
    text = f".. py:data:: {public.name}\n   :module: {public.room}\n"
    source = ast.unparse(node.value) if node.value is not None else ""
    if source and len(source) <= LONGEST_VALUE:
        text += f"   :value: {source}\n"
    said = to_rst(text_after(public.home, public.name))
    return text + "\n" + "".join(f"   {line}\n" for line in said.splitlines())


def _toctree(entries: list[str]) -> str:
    return ".. toctree::\n   :maxdepth: 1\n\n" + "".join(f"   {entry}\n" for entry in entries)
