"""Mutants of a reference by its syntax tree, each with what it does wrong, in words.

They stand for mistakes that no list foresees, and are tried where neither a slip nor a relation
explains an answer. The words describe a construct by arguments and quantities, not by its line.
"""

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhf_lab.course.exercise import Answer, Exercise
from rlhf_lab.course.mutants import Rewrite, compiled_mutant, source_of
from rlhf_lab.course.rewritten_calls import of_calls
from rlhf_lab.course.rewritten_places import of_places
from rlhf_lab.course.wording import Wording

Path = tuple[tuple[str, int | None], ...]
"""The way from a tree to one of its nodes: fields, and places in those that are lists."""

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
            continue  # see of_places
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
    ast.Call: of_calls,
    ast.Subscript: of_places,
    ast.If: _of_branches,
    ast.IfExp: _of_branches,
    ast.Name: _of_names,
    ast.Tuple: _of_tuples,
}
