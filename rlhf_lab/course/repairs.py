"""Repairs of a learner's own code: the one change that makes it right tells what is wrong in it.

The words name the line and what is wrong there, and leave the change to the learner.
"""

import ast
import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from rlhf_lab.course.exercise import Answer, Exercise
from rlhf_lab.course.rewrites import changed, changes, statements, written_nodes
from rlhf_lab.course.wording import NOUNS, Wording

Blamed = tuple[str, Answer]
"""What is wrong with a piece of code, and the code without that."""

TOUCHES_THE_OUTSIDE = re.compile(
    r"\b(open|exec|eval|input|os|sys|shutil|subprocess|Path|pathlib|requests|socket|save|write\w*|"
    r"unlink|rmdir|remove|mkdir|to_csv|kill)\b"
)
"""Code that may reach beyond its arguments is run as it was written, and in no other form."""
MISSING = {
    "cumsum": "(-1)",
    "exp": "()",
    "log": "()",
    "log_softmax": "(-1)",
    "softmax": "(-1)",
    "square": "()",
    "sqrt": "()",
    "abs": "()",
    "sum": "(-1)",
    "mean": "(-1)",
    "detach": "()",
    "float": "()",
    "double": "()",
    "flip": "(-1)",
    "clone": "()",
}
SAID_OTHERWISE = {
    "detach": "{x} has to be detached",
    "float": "{x} has to be float32 first",
    "double": "{x} has to be float64 first",
    "flip": "{x} stands in backward order",
    "clone": "{x} has to be copied first",
}


def repairs(exercise: Exercise, fn: Answer) -> Iterator[Blamed]:
    """Every version of a learner's code with one change in it; none where it cannot be read."""
    inner = inspect.unwrap(fn)
    try:
        source = textwrap.dedent(inspect.getsource(inner))
        tree = ast.parse(source)
        namespace = _namespace(inner)
    except (OSError, TypeError, SyntaxError):
        return
    if TOUCHES_THE_OUTSIDE.search(source) or not isinstance(
        tree.body[0], ast.FunctionDef | ast.ClassDef
    ):
        return
    wording = Wording(tree, own=True)
    for path, node in written_nodes(tree, exercise.methods):
        line = getattr(node, "lineno", None)
        for says, new in _blamed(node, wording):
            made = _made(changed(tree, path, new), namespace, exercise.name)
            if made is not None:
                yield f"line {line} of your function: {says}", made


def _namespace(inner: Any) -> dict[str, Any]:
    if not inspect.isclass(inner):
        return inner.__globals__
    return next(part.__globals__ for part in vars(inner).values() if inspect.isfunction(part))


def _made(tree: ast.AST, namespace: dict[str, Any], name: str) -> Answer | None:
    definition: Any = tree.body[0]
    definition.decorator_list = []
    _without_annotations(tree)
    here = dict(namespace)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(ast.fix_missing_locations(tree), "<repair>", "exec"), here)
    except Exception:  # not every change is Python
        return None
    return here.get(name)


def _without_annotations(tree: ast.AST) -> None:
    """A type check of what comes back would hide what is wrong with it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None


def _blamed(node: ast.AST, wording: Wording) -> Iterator[tuple[str, ast.AST]]:
    """The changes of a node, with what is wrong with the node if that one makes it right."""
    for _, new in changes(node, wording):
        says = _blame(node, new, wording)
        if says:
            yield says, new
    for _, body in statements(node, wording):
        block: Any = type(node)(**{field: value for field, value in ast.iter_fields(node)})
        block.body = list(body)
        short = len(body) < len(node.body)
        yield "a step is too much" if short else "two steps come in the wrong order", block
    yield from _missing(node, wording)


def _blame(node: Any, new: Any, wording: Wording) -> str | None:
    whole = wording.of(node)
    if isinstance(node, ast.BinOp):
        one, two = wording.of(node.left), wording.of(node.right)
        if new is node.left or new is node.right:
            return f"{two if new is node.left else one} does not belong there"
        if isinstance(new, ast.BinOp) and new.left is node.right:
            return f"{one} and {two} stand the wrong way round"
        return f"this is the wrong operation between {one} and {two}"
    if isinstance(node, ast.Compare | ast.BoolOp | ast.If | ast.IfExp):
        tested = node.test if isinstance(node, ast.If | ast.IfExp) else node
        return f"the condition on {wording.of(tested)} is not the one that is due"
    if isinstance(node, ast.UnaryOp):
        return f"the sign of {wording.of(node.operand)} is wrong"
    if isinstance(node, ast.Constant):
        return f"{node.value!r} is not the number that is due"
    if isinstance(node, ast.Name):
        return f"{whole} is not the quantity that is due"
    if isinstance(node, ast.Subscript):
        return f"the part that is taken out of {wording.of(node.value)} is not the one that is due"
    if isinstance(node, ast.Tuple):
        return f"{' and '.join(wording.of(part) for part in node.elts)} stand the wrong way round"
    if isinstance(node, ast.Call):
        return _blame_call(node, new, wording)
    return None


def _blame_call(node: ast.Call, new: Any, wording: Wording) -> str:
    name, inner = wording.name_of_call(node), wording.inner(node)
    of = f" of {wording.of(inner)}" if inner is not None else ""
    if not isinstance(new, ast.Call) or new is inner:
        return f"{wording.noun(name)}{of} is one step too many"
    other = wording.name_of_call(new)
    if other != name:
        return f"{wording.noun(name)}{of} is not what is due"
    if ast.dump(new.func) == ast.dump(node.func) and len(new.args) == len(node.args):
        if [ast.dump(a) for a in new.args] != [
            ast.dump(a) for a in node.args
        ] and name not in NOUNS:
            return f"the arguments of {name} stand in the wrong order"
    if name in NOUNS or name == "flip":
        return f"{wording.noun(name)}{of} runs along the wrong axis"
    return f"the arguments of {name} are not those that are due"


def _missing(node: ast.AST, wording: Wording) -> Iterator[tuple[str, ast.AST]]:
    """What could have been forgotten about an expression, and an axis of a sum or mean."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in ("sum", "mean", "amax", "std", "var", "norm") and not node.args:
            given = {keyword.arg for keyword in node.keywords}
            for axis, keep in ((-1, True), (-1, False), (0, False), (0, True), (-2, True)):
                pairs = [("dim", axis)] if "dim" not in given else []
                pairs += [("keepdim", True)] if keep and "keepdim" not in given else []
                more = [ast.keyword(key, ast.Constant(value)) for key, value in pairs]
                says = f"{wording.of(node)} needs its axis (dim), or has to keep it (keepdim)"
                if more:
                    yield says, ast.Call(node.func, node.args, [*node.keywords, *more])
    if not isinstance(node, ast.Name | ast.Call | ast.BinOp | ast.Subscript):
        return
    if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return
    said = wording.of(node)
    for name, arguments in MISSING.items():
        new = ast.parse(f"({ast.unparse(node)}).{name}{arguments}", mode="eval").body
        words = SAID_OTHERWISE.get(name, f"{NOUNS.get(name, name)} of {{x}} is missing")
        yield words.format(x=said), new
    yield f"the sign of {said} is wrong", ast.UnaryOp(ast.USub(), node)
