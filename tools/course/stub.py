"""Exercise stubs and solutions as source text."""

import ast
import builtins
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.mutants import source_of

UNWRITTEN = "raise NotImplementedError"
SECTION = re.compile(r'\n+ *Raises:\n(?: {8,}\S[^\n]*\n)+(?= *""")')
MISUSE = re.compile(
    r'\s*\bRaises\s+\w+Error\b.*?\.(?=\s|""")'
    r"|\s*\bNo sequence, or no\s+token, gives an empty result\.",
    re.DOTALL,
)
"""What a docstring promises for arguments that the check does not try."""


def solution_source(exercise: Exercise, bound: set[str]) -> str:
    """The reference's source, with the imports it needs on top.

    Args:
        bound: names that earlier cells define or import.
    """
    source = source_of(exercise.reference)
    return _with_imports(exercise.reference, source, used_names(source) - bound)


def stub_source(exercise: Exercise, bound: set[str]) -> str:
    """Signature and docstring with nothing behind them, and the imports the solution would need.

    Of a class, only the exercise's methods are emptied. Private helpers are not imported, since
    they would give the solution away. What the docstring says about errors is left out unless the
    check tries them.
    """
    source = source_of(exercise.reference)
    helpers = {name for name in used_names(source) if not name.startswith("_")}
    stub = emptied(source, exercise.methods, exercise.step_free)
    stub = stub if exercise.errors_tried else without_misuse(stub)
    return _with_imports(exercise.reference, stub, helpers - bound)


def without_misuse(stub: str) -> str:
    """A stub whose docstrings promise nothing for arguments that are refused, or empty."""
    left = MISUSE.sub("", SECTION.sub("\n", stub))
    return re.sub(r'\n\n( *""")', r"\n\1", left)


def emptied(source: str, methods: tuple[str, ...] = (), step_free: bool = False) -> str:
    """Source without the body of the function, or without those of some methods of the class.

    Args:
        step_free: leave the first paragraph of the docstring alone.
    """
    definition = ast.parse(source).body[0]
    functions = [definition]
    if isinstance(definition, ast.ClassDef):
        functions = [node for node in definition.body if getattr(node, "name", None) in methods]
    lines = source.splitlines()
    for function in reversed(functions):
        docstring = function.body[0]
        indent = " " * docstring.col_offset
        kept = [indent + UNWRITTEN]
        if step_free:
            words = inspect.cleandoc(docstring.value.value).partition("\n\n")[0]
            kept = [*textwrap.indent(f'"""{words}"""', indent).splitlines(), *kept]
        first = docstring.lineno - 1 if step_free else docstring.end_lineno
        lines[first : function.end_lineno] = kept
    return "\n".join(lines)


def used_names(source: str) -> set[str]:
    """Names that a definition takes from around it."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    methods = {part for n in nodes if isinstance(n, ast.ClassDef) for part in n.body}
    defined = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef))
    bound |= {n.name for n in defined if n not in methods}
    return {name for name in loaded - bound if not hasattr(builtins, name)}


def bound_names(source: str) -> set[str]:
    """Names that a cell imports or defines at its top level."""
    lines = (line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
    code = "\n".join(lines)
    names: set[str] = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _with_imports(reference: Callable[..., Any], source: str, names: set[str]) -> str:
    """A definition below the imports of some names, one line per module."""
    wanted: dict[str, list[str]] = {}
    for name in sorted(names):
        module, imported = _origin(reference.__module__, name)
        wanted.setdefault(module, []).append(imported)
    lines = [f"import {name}" for name in wanted.pop("", [])]
    for module, imported in sorted(wanted.items()):
        lines.append(f"from {module} import {', '.join(sorted(imported))}")
    return "\n".join([*lines, "", "", source]).strip()


def _origin(module: str, name: str) -> tuple[str, str]:
    """Where the reference's module gets a name from, and how the import names it.

    The first is empty for `import name`, and the module itself if the name is its own.
    """
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return getattr(node, "module", ""), ast.unparse(alias)
    return module, name
