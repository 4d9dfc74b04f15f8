"""API pages in reStructuredText: one for each room, its names grouped by module."""

import ast
import inspect
from itertools import groupby
from pathlib import Path

from tools.site.public import (
    PublicName,
    definitions,
    public_names,
    rooms,
    text_after,
    to_rst,
    tree,
)

SPLIT = "rlhf_lab.functional"  # the room with a page for each module
WITHOUT_SIGNATURE = "RLHFArgs"  # its parameters are on the page of settings
LONGEST_VALUE = 300
START = """API
===

Every name that a room of the package exports, from the docstrings. ``functional`` is the
mathematics; the trainer is in ``training``, and its settings have a separate page.

"""


def write_api(directory: Path) -> None:
    """Write the pages of all rooms into a new directory."""
    directory.mkdir(parents=True)
    entries = []
    for room in rooms():
        short = room.removeprefix("rlhf_lab.")
        homes = _group_by_module(room)
        if room == SPLIT:
            (directory / short).mkdir()
            names = [home.rpartition(".")[2] for home, _ in homes]
            for name, (home, publics) in zip(names, homes, strict=True):
                _write(directory / short / name, [_head(home), *map(_entry, publics)])
            _write(directory / short / "index", [_head(room), _toctree(names)])
            entries.append(f"{short}/index")
        else:
            parts = [_head(room)]
            for home, publics in homes:
                parts += [_section(room, home)] * (home != room)
                parts += map(_entry, publics)
            _write(directory / short, parts)
            entries.append(short)
    (directory / "index.rst").write_text(START + _toctree(entries), encoding="utf-8")


def _write(path: Path, parts: list[str]) -> None:
    path.with_suffix(".rst").write_text("\n".join(parts), encoding="utf-8")


def _group_by_module(room: str) -> list[tuple[str, list[PublicName]]]:
    found = sorted(public_names(room), key=lambda public: public.home)
    return [(home, list(group)) for home, group in groupby(found, lambda public: public.home)]


def _text(module: str) -> str:
    return ast.get_docstring(tree(module)) or ""


def _head(module: str) -> str:
    title = module.removeprefix("rlhf_lab.")
    return f"{title}\n{'=' * len(title)}\n\n.. py:module:: {module}\n\n{to_rst(_text(module))}\n"


def _section(room: str, home: str) -> str:
    title = home.removeprefix(f"{room}.").removeprefix("rlhf_lab.").replace("_", " ")
    first = to_rst(_text(home).split("\n\n")[0])
    return f"{title}\n{'-' * len(title)}\n\n{first}\n"


def _entry(public: PublicName) -> str:
    """Return the directive that documents a name."""
    value = public.value
    if inspect.isclass(value):
        path = public.path + "()" * (public.name == WITHOUT_SIGNATURE)
        text = f".. autoclass:: {path}\n   :members:\n"
        if fields := getattr(value, "_fields", ()):  # the signature shows them
            text += f"   :exclude-members: {', '.join(fields)}\n"
        return text
    if inspect.isfunction(value):
        return f".. autofunction:: {public.path}\n"
    node = definitions(tree(public.home))[public.name]
    text = f".. py:data:: {public.name}\n   :module: {public.room}\n"
    code = ast.unparse(node.value) if node.value is not None else ""
    if code and len(code) <= LONGEST_VALUE:
        text += f"   :value: {code}\n"
    comment = to_rst(text_after(public.home, public.name))
    return text + "\n" + "".join(f"   {line}\n" for line in comment.splitlines())


def _toctree(entries: list[str]) -> str:
    return ".. toctree::\n   :maxdepth: 1\n\n" + "".join(f"   {entry}\n" for entry in entries)
