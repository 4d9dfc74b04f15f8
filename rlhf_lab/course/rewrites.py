"""Mutants of a reference by its syntax tree, each with what it does wrong, in words.

They stand for mistakes that no list foresees, and are tried where neither a slip nor a relation
explains an answer. The words describe a construct by arguments and quantities, not by its line.
"""

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhf_lab.course.exercise import Answer, Exercise
from rlhf_lab.course.mutants import compiled_mutant, source_of
from rlhf_lab.course.wording import Wording

Path = tuple[tuple[str, int | None], ...]
"""The way from a tree to one of its nodes: fields, and places in those that are lists."""
Rewrite = tuple[str, ast.AST]
"""What a rewrite does wrong, and the node that stands there then."""

OVER_AN_AXIS = frozenset(
    {"mean", "sum", "std", "var", "cumsum", "flip", "softmax", "log_softmax", "argmax", "any"}
    | {"all", "amax", "logsumexp"}
)
"""Operations along an axis, which is their first argument."""
SKIPPED_FIELDS = frozenset({"annotation", "returns", "decorator_list", "ctx", "exc"})
OTHER_WAY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
COMPARED = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
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


def rewrites(exercise: Exercise) -> Iterator[tuple[str, Answer]]:
    """Every rewrite of what the learner writes of a reference that compiles, with its words.

    1. At each node, whatever `changes` knows for its kind.
    2. Statements left out, and neighbours the other way round.
    """
    tree = ast.parse(source_of(exercise.reference))
    wording = Wording(tree)
    for path, node in written_nodes(tree, exercise.methods):
        for says, new in changes(node, wording):
            yield from _runnable(exercise, says, changed(tree, path, new))
        for says, body in statements(node, wording):
            block = copy.copy(node)
            block.body = list(body)
            yield from _runnable(exercise, says, changed(tree, path, block))


def _runnable(exercise: Exercise, says: str, tree: ast.AST) -> Iterator[tuple[str, Answer]]:
    try:
        yield (
            says,
            compiled_mutant(exercise.reference, ast.unparse(ast.fix_missing_locations(tree)), {}),
        )
    except Exception:  # not every rewrite is Python, or can be defined
        return


def written_nodes(tree: ast.Module, methods: Sequence[str]) -> Iterator[tuple[Path, Any]]:
    """The nodes that a learner writes: without annotations, docstrings and refusals."""
    definition = tree.body[0]
    root: Path = (("body", 0),)
    if not isinstance(definition, ast.ClassDef):
        yield from _below(definition, root)
        return
    for i, part in enumerate(definition.body):
        if getattr(part, "name", None) in methods:
            yield from _below(part, (*root, ("body", i)))


def _below(node: ast.AST, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, ast.Raise) or _is_text(node) or _refuses(node):
        return
    yield path, node
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS or isinstance(node, ast.arguments):
            continue
        if field == "slice" and not isinstance(value, ast.Name | ast.UnaryOp):
            continue  # see _of_places
        if isinstance(value, ast.Constant) and isinstance(node, ast.keyword):
            continue  # see _of_arguments
        if isinstance(value, list):
            for i, part in enumerate(value):
                if isinstance(part, ast.AST):
                    yield from _below(part, (*path, (field, i)))
        elif isinstance(value, ast.AST):
            yield from _below(value, (*path, (field, None)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _refuses(node: ast.AST) -> bool:
    """Whether a statement only refuses bad input."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).split(".")[-1].startswith("check_")
    body = node.body if isinstance(node, ast.If | ast.For) else None
    return bool(body) and all(isinstance(part, ast.Raise) or _refuses(part) for part in body)


def changed(tree: ast.AST, path: Path, new: ast.AST) -> ast.AST:
    """A copy of a tree with another node in one place."""
    tree = copy.deepcopy(tree)
    at: Any = tree
    for field, i in path[:-1]:
        at = getattr(at, field) if i is None else getattr(at, field)[i]
    field, i = path[-1]
    if i is None:
        setattr(at, field, copy.deepcopy(new))
    else:
        getattr(at, field)[i] = copy.deepcopy(new)
    return tree


def changes(node: ast.AST, wording: Wording) -> Iterator[Rewrite]:
    """What can be done wrong at a node, by its kind."""
    known = CHANGES.get(type(node))
    if known is not None:
        yield from known(node, wording)


def _of_operations(node: ast.BinOp, wording: Wording) -> Iterator[Rewrite]:
    """A part left out, another operation, the two the other way round."""
    left, right = node.left, node.right
    one, two = wording.of(left), wording.of(right)
    if isinstance(node.op, ast.Add):
        yield f"{two} were not added", left
        yield f"{one} were left out, to which {two} is added", right
        yield f"{two} were subtracted, and not added", ast.BinOp(left, ast.Sub(), right)
    elif isinstance(node.op, ast.Sub):
        yield f"{two} were not subtracted", left
        yield f"a difference were the other way round, that of {one} and {two}", _swapped(node)
        yield f"{two} were added, and not subtracted", ast.BinOp(left, ast.Add(), right)
        yield f"{one} were left out, from which {two} is subtracted", ast.UnaryOp(ast.USub(), right)
    elif isinstance(node.op, ast.Mult):
        yield f"the factor {two} were left out", left
        yield f"the factor {one} were left out", right
        yield f"{two} were divided by, and not multiplied with", ast.BinOp(left, ast.Div(), right)
        yield f"{one} and {two} were added, and not multiplied", ast.BinOp(left, ast.Add(), right)
        yield f"the factor {two} were there twice", ast.BinOp(node, ast.Mult(), right)
        yield f"the factor {one} were there twice", ast.BinOp(left, ast.Mult(), node)
    elif isinstance(node.op, ast.Div):
        yield f"the division by {two} were left out", left
        yield f"{two} were multiplied with, and not divided by", ast.BinOp(left, ast.Mult(), right)
        yield f"a ratio were upside down, that of {one} and {two}", _swapped(node)
        root = ast.BinOp(right, ast.Pow(), ast.Constant(0.5))
        yield f"the division were by the root of {two}", ast.BinOp(left, ast.Div(), root)
        yield f"{two} were divided by twice", ast.BinOp(node, ast.Div(), right)
    elif isinstance(node.op, ast.BitAnd | ast.BitOr):
        other = ast.BitOr() if isinstance(node.op, ast.BitAnd) else ast.BitAnd()
        yield f"'and' and 'or' of {one} and {two} were exchanged", ast.BinOp(left, other, right)
        yield f"the condition {two} were left out", left
        yield f"the condition {one} were left out", right


def _swapped(node: ast.BinOp) -> ast.BinOp:
    return ast.BinOp(node.right, node.op, node.left)


def _of_comparisons(node: ast.Compare, wording: Wording) -> Iterator[Rewrite]:
    one, two = wording.of(node.left), wording.of(node.comparators[0])
    for other in COMPARED.get(type(node.ops[0]), ()):
        equal = {type(node.ops[0]), other} in ({ast.Lt, ast.LtE}, {ast.Gt, ast.GtE})
        way = f"the case that {one} equals {two} were on the other side"
        says = way if equal else f"the comparison of {one} with {two} were the other way round"
        yield says, ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)


def _of_conditions(node: ast.BoolOp, wording: Wording) -> Iterator[Rewrite]:
    for i, value in enumerate(node.values):
        rest = [v for j, v in enumerate(node.values) if j != i]
        new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        yield f"the condition on {wording.of(value)} were left out", new


def _of_signs(node: ast.UnaryOp, wording: Wording) -> Iterator[Rewrite]:
    inner = wording.of(node.operand)
    if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield f"the minus sign of {inner} were missing", node.operand
    if isinstance(node.op, ast.Invert | ast.Not):
        yield f"{inner} were not inverted", node.operand


def _of_numbers(node: ast.Constant, wording: Wording) -> Iterator[Rewrite]:
    """Another constant, for those that stand in a formula."""
    value = node.value
    if isinstance(value, bool):
        yield f"{not value} stood where {value} is due", ast.Constant(not value)
    elif isinstance(value, int | float):
        others = {0: (1,), 1: (0, 2), 2: (1, 3), 0.5: (1.0, 0.25)}.get(value, ())
        for other in others or (0.0, 1.0, 2 * value, value / 2, 10 * value, value / 10):
            yield f"{other:g} stood where {value:g} is due", ast.Constant(other)


def _of_calls(node: ast.Call, wording: Wording) -> Iterator[Rewrite]:
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


def _of_places(node: ast.Subscript, wording: Wording) -> Iterator[Rewrite]:
    """Slices that begin or end elsewhere, another index, an added axis in another place."""
    whole = wording.of(node.value)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for i, part in enumerate(parts):
        for says, new in _other_places(part, whole):
            there = [*parts[:i], new, *parts[i + 1 :]]
            slice_ = ast.Tuple(there, ast.Load()) if len(parts) > 1 else there[0]
            yield says, ast.Subscript(node.value, slice_, node.ctx)
    if not isinstance(node.ctx, ast.Store):
        yield f"all of {whole} were taken, and not a part of it", node.value
    if len(parts) == 2:
        turned = ast.Tuple(parts[::-1], ast.Load())
        says = f"the two axes of {whole} were exchanged"
        yield says, ast.Subscript(node.value, turned, node.ctx)


def _other_places(part: ast.AST, whole: str) -> Iterator[Rewrite]:
    if isinstance(part, ast.Slice):
        for bound, verb in (("lower", "began"), ("upper", "ended")):
            there = getattr(part, bound)
            for step, way in ((1, "later"), (-1, "earlier")):
                new = copy.copy(part)
                if there is None:
                    if (bound, step) not in (("lower", 1), ("upper", -1)):
                        continue
                    setattr(new, bound, ast.Constant(step))
                else:
                    setattr(new, bound, _shifted(there, step))
                yield f"what is cut out of {whole} {verb} one place {way}", new
            if there is not None:
                new = copy.copy(part)
                setattr(new, bound, None)
                where = "at the front" if bound == "lower" else "at the end"
                yield f"nothing were cut off {where} of {whole}", new
        return
    try:
        value = ast.literal_eval(part)
    except (ValueError, TypeError):
        return
    if isinstance(value, int) and not isinstance(value, bool):
        ends = {0: (-1, "the last"), -1: (0, "the first")}
        if value in ends:
            other, which = ends[value]
            yield f"{which} of {whole} were taken", ast.Constant(other)
        for step in (1, -1):
            yield f"another one of {whole} were taken, one place off", ast.Constant(value + step)


def _shifted(bound: ast.AST, step: int) -> ast.AST:
    """A bound one further; -1 plus 1 is the end."""
    if isinstance(bound, ast.UnaryOp | ast.Constant):
        value = ast.literal_eval(bound)
        if value == -1 and step == 1:
            return ast.Constant(None)
        return ast.Constant(value + step)
    return ast.BinOp(bound, ast.Add(), ast.Constant(step))


def _of_branches(node: ast.If | ast.IfExp, wording: Wording) -> Iterator[Rewrite]:
    for value, words in ((True, "always"), (False, "never")):
        new = copy.copy(node)
        new.test = ast.Constant(value)
        yield f"the case were {words} there that {wording.condition(node.test)}", new


def _of_names(node: ast.Name, wording: Wording) -> Iterator[Rewrite]:
    """Another argument of the same kind; another quantity that is worked out before."""
    if not isinstance(node.ctx, ast.Load):
        return
    for other in wording.alike(node.id):
        says = f"{wording.quantity(other)} stood where {wording.quantity(node.id)} is due"
        yield says, ast.Name(other, ast.Load())


def _of_tuples(node: ast.Tuple, wording: Wording) -> Iterator[Rewrite]:
    plain = any(isinstance(part, ast.Constant | ast.Slice) for part in node.elts)
    if isinstance(node.ctx, ast.Load) and len(node.elts) == 2 and not plain:
        one, two = (wording.of(part) for part in node.elts)
        yield f"{one} and {two} were exchanged", ast.Tuple(node.elts[::-1], ast.Load())


def statements(node: ast.AST, wording: Wording) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Blocks with a step left out, or two that follow each other exchanged."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for i, statement in enumerate(body):
        if _is_text(statement) or _refuses(statement):
            continue
        step = wording.step(statement)
        if step and len(body) > 1:
            yield f"{step} were left out", body[:i] + body[i + 1 :]
        after = wording.step(body[i + 1]) if i + 1 < len(body) else None
        if step and after:
            swapped = [*body[:i], body[i + 1], statement, *body[i + 2 :]]
            yield f"{after} came before {step}", swapped


CHANGES: dict[type, Callable[[Any, Wording], Iterator[Rewrite]]] = {
    ast.BinOp: _of_operations,
    ast.Compare: _of_comparisons,
    ast.BoolOp: _of_conditions,
    ast.UnaryOp: _of_signs,
    ast.Constant: _of_numbers,
    ast.Call: _of_calls,
    ast.Subscript: _of_places,
    ast.If: _of_branches,
    ast.IfExp: _of_branches,
    ast.Name: _of_names,
    ast.Tuple: _of_tuples,
}
