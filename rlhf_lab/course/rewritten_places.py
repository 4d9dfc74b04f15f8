"""Wrong rewrites of where a tensor is cut: other bounds, another index, other axes."""

import ast
import copy
from collections.abc import Iterator

from rlhf_lab.course.mutants import Rewrite
from rlhf_lab.course.wording import Wording


def of_places(node: ast.Subscript, wording: Wording) -> Iterator[Rewrite]:
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
