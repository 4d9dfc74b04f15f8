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
from rlhf_lab.course.mutants import dedented_source

UNWRITTEN = "raise NotImplementedError"
SECTION = re.compile(r'\n+ *Raises:\n(?: {8,}\S[^\n]*\n)+(?= *""")')
MISUSE = re.compile(  # errors and empty results that the check does not try
    r'\s*\bRaises\s+\w+Error\b.*?\.(?=\s|""")'
    r"|\s*\bNo sequence, or no\s+token, gives an empty result\.",
    re.DOTALL,
)


def function_source(function: Callable[..., Any], bound: set[str]) -> str:
    """Return the source of a function, preceded by imports of names that are not bound."""
    source = dedented_source(function)
    return _with_imports(function, source, used_names(source) - bound)


def stub_source(exercise: Exercise, bound: set[str]) -> str:
    """Return signature and docstring only, with the imports that the solution would need.

    Private helpers are not imported, since they would give the solution away. The docstring does
    not mention errors that the check does not try.
    """
    source = dedented_source(exercise.reference)
    helpers = {name for name in used_names(source) if not name.startswith("_")}
    stub = emptied(source, exercise.methods, exercise.step_free)
    if not exercise.errors_tried:
        stub = re.sub(r'\n\n( *""")', r"\n\1", MISUSE.sub("", SECTION.sub("\n", stub)))
    return _with_imports(exercise.reference, stub, helpers - bound)


def emptied(source: str, methods: tuple[str, ...] = (), step_free: bool = False) -> str:
    """Remove the body of a function, or of some methods of a class.

    With `step_free`, only the first paragraph of the docstring is kept.
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
            first = inspect.cleandoc(docstring.value.value).partition("\n\n")[0]
            kept = [*textwrap.indent(f'"""{first}"""', indent).splitlines(), *kept]
        start = docstring.lineno - 1 if step_free else docstring.end_lineno
        lines[start : function.end_lineno] = kept
    return "\n".join(lines)


def used_names(source: str) -> set[str]:
    """List the names that a definition uses and does not define."""
    nodes = list(ast.walk(ast.parse(source)))
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    methods = {part for n in nodes if isinstance(n, ast.ClassDef) for part in n.body}
    defined = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef))
    bound |= {n.name for n in defined if n not in methods}
    return {name for name in loaded - bound if not hasattr(builtins, name)}


def bound_names(source: str) -> set[str]:
    """List the names that a cell imports or defines at its top level."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    names: set[str] = set()
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _with_imports(reference: Callable[..., Any], source: str, names: set[str]) -> str:
    imports: dict[str, list[str]] = {}
    for name in sorted(names):
        module, imported = _origin(reference.__module__, name)
        imports.setdefault(module, []).append(imported)
    lines = [f"import {name}" for name in imports.pop("", [])]
    for module, imported in sorted(imports.items()):
        lines.append(f"from {module} import {', '.join(sorted(imported))}")
    return "\n".join([*lines, "", "", source]).strip()


def _origin(module: str, name: str) -> tuple[str, str]:
    """Return the module ("" for `import name`) and the form in which the reference imports it."""
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return getattr(node, "module", ""), ast.unparse(alias)
    return module, name
