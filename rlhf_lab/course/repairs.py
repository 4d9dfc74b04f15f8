"""Repairs of a learner's own code: the one change that makes it right tells what is wrong in it.

The words name the line and what is wrong there, and leave the change to the learner.
"""

import ast
from collections.abc import Iterator
from typing import Any

from rlhf_lab.course.exercise import Answer, Exercise
from rlhf_lab.course.own_code import own_code
from rlhf_lab.course.rewrites import changed, changes, statements, written_nodes
from rlhf_lab.course.wording import NOUNS, Wording

Blamed = tuple[str, Answer]
"""What is wrong with a piece of code, and the code without that."""

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
    code = own_code(fn)
    if code is None:
        return
    wording = Wording(code.tree, own=True)
    for path, node in written_nodes(code.tree, exercise.methods):
        for line, says, new in (*_moved(node), *_blamed(node, wording)):
            made = code.made(changed(code.tree, path, new))
            if made is not None:
                yield f"line {line} of your function: {says}", made


def _moved(node: ast.AST) -> Iterator[tuple[int, str, ast.AST]]:
    """Blocks with a step moved out of a loop, or into one."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for i, loop in enumerate(body):
        if not isinstance(loop, ast.For | ast.While):
            continue
        for j, step in enumerate(loop.body):
            rest = loop.body[:j] + loop.body[j + 1 :]
            if isinstance(step, ast.Assign) and rest:
                says = "this is done anew in each round of the loop, and belongs in front of it"
                there = [*body[:i], step, _with_body(loop, rest), *body[i + 1 :]]
                yield step.lineno, says, _with_body(node, there)
            elif isinstance(step, ast.Return) and rest:
                says = "this ends the loop in its first round, and belongs behind it"
                there = [*body[:i], _with_body(loop, rest), step, *body[i + 1 :]]
                yield step.lineno, says, _with_body(node, there)
        for j, step in enumerate(body[:i]):
            if isinstance(step, ast.Assign):
                says = "this is done once, and belongs inside the loop, anew in each round"
                inner = _with_body(loop, [step, *loop.body])
                there = [*body[:j], *body[j + 1 : i], inner, *body[i + 1 :]]
                yield step.lineno, says, _with_body(node, there)


def _with_body(node: ast.AST, body: list[ast.stmt]) -> ast.AST:
    block: Any = type(node)(**dict(ast.iter_fields(node)))
    block.body = list(body)
    return block


def _blamed(node: ast.AST, wording: Wording) -> Iterator[tuple[int, str, ast.AST]]:
    """The changes of a node, with what is wrong with the node if that one makes it right."""
    line = getattr(node, "lineno", 0)
    for _, new in changes(node, wording):
        says = _blame(node, new, wording)
        if says:
            yield line, says, new
    for _, body in statements(node, wording):
        short = len(body) < len(node.body)
        says = "this step is too much" if short else "this step and the next are in the wrong order"
        at = next((i for i, step in enumerate(body) if step is not node.body[i]), len(body))
        yield node.body[at].lineno, says, _with_body(node, body)
    yield from ((line, *missing) for missing in _missing(node, wording))


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
