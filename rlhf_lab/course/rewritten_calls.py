"""Wrong rewrites of a call: another function, another axis, other arguments."""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_lab.course.mutants import Rewrite
from rlhf_lab.course.wording import Wording

OVER_AN_AXIS = frozenset(
    {"mean", "sum", "std", "var", "cumsum", "flip", "softmax", "log_softmax", "argmax", "any"}
    | {"all", "amax", "logsumexp"}
)
"""Operations along an axis, which is their first argument."""
INSTEAD = {
    "mean": ("sum", "amax"),
    "sum": ("mean", "amax", "prod"),
    "softmax": ("log_softmax", "sigmoid"),
    "log_softmax": ("softmax",),
    "exp": ("sigmoid", "expm1"),
    "log": ("log2", "log10", "log1p"),
    "square": ("abs",),
    "std": ("var",),
    "masked_std": ("masked_var",),
    "minimum": ("maximum",),
    "maximum": ("minimum",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "argmax": ("argmin",),
    "argmin": ("argmax",),
    "sqrt": ("square",),
}


def of_calls(node: ast.Call, wording: Wording) -> Iterator[Rewrite]:
    """Left out, another function, another axis, arguments left out or exchanged."""
    name = wording.name_of_call(node)
    whole = wording.of(node)
    inner = node.func.value if wording.is_method(node) else next(iter(node.args), None)
    if inner is not None and not isinstance(inner, ast.Starred):
        yield wording.without(node), inner
    for other in INSTEAD.get(name, ()):
        yield (
            f"{wording.noun(other)} stood where {wording.noun(name)} is due",
            _renamed(node, other),
        )
    if name in ("where",) and len(node.args) == 3:
        test, yes, no = node.args
        yield f"{wording.of(yes)} stood everywhere, whatever {wording.of(test)} says", yes
        yield f"{wording.of(no)} stood everywhere, whatever {wording.of(test)} says", no
        flipped = ast.Call(node.func, [test, no, yes], node.keywords)
        yield f"the two sides were exchanged of what {wording.of(test)} decides", flipped
        yield f"{wording.of(test)} were multiplied with", ast.BinOp(yes, ast.Mult(), test)
    if name == "cumsum":
        flipped = ast.parse(f"({ast.unparse(inner)}).flip(-1).cumsum(-1).flip(-1)", mode="eval")
        yield "the running sum came from the other end", flipped.body
    if name == "reversed" and node.args:
        yield "this went forward and not backward", node.args[0]
    yield from _of_axes(node, whole)
    yield from _of_arguments(node, name, wording)


def _renamed(node: ast.Call, other: str) -> ast.Call:
    func = copy.copy(node.func)
    setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", other)
    return ast.Call(func, node.args, node.keywords)


def _of_axes(node: ast.Call, whole: str) -> Iterator[Rewrite]:
    """Another axis, or none, which leaves no axis to keep."""
    over_all = f"{whole} went over everything, and not along one axis"
    for i, keyword in enumerate(node.keywords):
        rest = [k for j, k in enumerate(node.keywords) if j != i]
        if keyword.arg in ("dim", "axis"):
            bare = [k for k in rest if k.arg != "keepdim"]
            yield over_all, ast.Call(node.func, node.args, bare)
            yield from _other_axes(
                node,
                keyword.value,
                whole,
                lambda v, rest=rest: (node.args, [*rest, ast.keyword("dim", v)]),
            )
    if (
        isinstance(node.func, ast.Attribute)
        and len(node.args) == 1
        and node.func.attr in OVER_AN_AXIS
    ):
        yield from _other_axes(node, node.args[0], whole, lambda v: ([v], node.keywords))
        yield over_all, ast.Call(node.func, [], [])


def _other_axes(
    node: ast.Call, axis: ast.AST, whole: str, made: Callable[[ast.AST], tuple[Any, Any]]
) -> Iterator[Rewrite]:
    try:
        here = ast.literal_eval(axis)
    except ValueError:
        return
    for other in {-1, -2, 0, 1} - {here}:
        args, keywords = made(ast.Constant(other))
        yield f"{whole} went along another axis", ast.Call(node.func, args, keywords)


def _of_arguments(node: ast.Call, name: str, wording: Wording) -> Iterator[Rewrite]:
    args = node.args
    for i, keyword in enumerate(node.keywords):
        rest = [k for j, k in enumerate(node.keywords) if j != i]
        if keyword.arg and keyword.arg not in ("dim", "axis"):
            yield f"{keyword.arg} were not set in {name}", ast.Call(node.func, args, rest)
    if len(args) > 1 and not wording.is_operation(name):
        yield (
            f"{wording.of(args[-1])} were not handed on to {name}",
            ast.Call(node.func, args[:-1], node.keywords),
        )
    for i, (one, two) in enumerate(zip(args, args[1:], strict=False)):
        if isinstance(one, ast.Constant) or isinstance(two, ast.Constant | ast.UnaryOp):
            continue
        swapped = [*args[:i], two, one, *args[i + 2 :]]
        says = f"{wording.of(one)} and {wording.of(two)} were exchanged"
        yield says, ast.Call(node.func, swapped, node.keywords)
