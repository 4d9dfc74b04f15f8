"""A learner's function as a syntax tree, and the function again from a changed tree."""

import ast
import contextlib
import inspect
import io
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from rlhf_lab.course.exercise import Answer

TOUCHES_THE_OUTSIDE = re.compile(
    r"\b(open|exec|eval|input|os|sys|shutil|subprocess|Path|pathlib|requests|socket|save|write\w*|"
    r"unlink|rmdir|remove|mkdir|to_csv|kill)\b"
)
"""Code that may reach beyond its arguments is run as it was written, and in no other form."""
FILLED = re.compile(r"zeros|ones|full|empty")


@dataclass(frozen=True)
class OwnCode:
    """A learner's function or class: its tree, and what its names are bound to."""

    name: str
    tree: ast.Module
    namespace: dict[str, Any]

    def made(self, tree: ast.AST) -> Answer | None:
        """The function from a changed tree; None where that is no Python."""
        definition: Any = tree.body[0]
        definition.decorator_list = []
        _without_annotations(tree)
        here = dict(self.namespace)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(ast.fix_missing_locations(tree), "<repair>", "exec"), here)
        except Exception:  # not every change is Python
            return None
        return here.get(self.name)


def own_code(fn: Answer) -> OwnCode | None:
    """The code of a learner's answer; None where it cannot be read, or is not to be run changed."""
    inner = inspect.unwrap(fn)
    try:
        source = textwrap.dedent(inspect.getsource(inner))
        tree = ast.parse(source)
        namespace = _namespace(inner)
    except (OSError, TypeError, SyntaxError, StopIteration):
        return None
    definition = tree.body[0]
    is_definition = isinstance(definition, ast.FunctionDef | ast.ClassDef)
    if TOUCHES_THE_OUTSIDE.search(source) or not is_definition:
        return None
    return OwnCode(definition.name, tree, namespace)


def uses_its_arguments(fn: Answer) -> bool:
    """Whether a function's result can depend on its arguments, but for their shape and type.

    False, too, where its source cannot be read.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(fn))))
    except (OSError, TypeError, SyntaxError):
        return False
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return False
    arguments = definition.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return any(_loads(statement, names) for statement in definition.body)


def _loads(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype", "device", "ndim"):
        return False
    if isinstance(node, ast.Call) and FILLED.search(ast.unparse(node.func).split(".")[-1]):
        return False
    return any(_loads(child, names) for child in ast.iter_child_nodes(node))


def _namespace(inner: Any) -> dict[str, Any]:
    if not inspect.isclass(inner):
        return inner.__globals__
    return next(part.__globals__ for part in vars(inner).values() if inspect.isfunction(part))


def _without_annotations(tree: ast.AST) -> None:
    """A type check of what comes back would hide what is wrong with it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
