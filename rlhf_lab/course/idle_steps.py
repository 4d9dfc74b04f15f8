"""Steps of a learner's own code that change nothing: a result thrown away, a copy written into."""

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_lab.course.containment import Stopped
from rlhf_lab.course.exercise import Answer, Case, Exercise
from rlhf_lab.course.outcomes import Outcome, compare_outcomes, observe
from rlhf_lab.course.own_code import OwnCode, own_code
from rlhf_lab.course.rewrites import Path, changed, written_nodes

SECONDS_PER_STEP = 2.0
GIVES_ANOTHER = frozenset(
    {"masked_fill", "clamp", "clip", "detach", "float", "double", "to", "scatter", "index_fill"}
    | {"index_copy", "index_put", "flip", "roll", "squeeze", "unsqueeze", "transpose", "where"}
    | {"exp", "log", "abs", "sort", "fill", "zero_masked", "nan_to_num", "mul", "add", "sub", "div"}
)
"""What gives a new tensor, and leaves the one that it is called upon as it is."""


def idle_step(
    exercise: Exercise, fn: Answer, cases: Sequence[Case], outcomes: Sequence[Outcome]
) -> str | None:
    """The first step of an answer that changes nothing although it looks as if it did.

    Without it the answer must do the same in every case.
    """
    code = own_code(fn)
    if code is None or all(outcome.error for outcome in outcomes):
        return None
    line = _compares_with_nan(code.tree)
    if line:
        return f"line {line} of your function compares with nan, which equals nothing: use isnan"
    tried = exercise, cases, outcomes
    for path, node, says in _suspects(code.tree, exercise):
        without = code.made(changed(code.tree, path, ast.Pass()))
        if without is not None and _does_the_same(without, *tried):
            says = says or _why_nothing_is_written(code, path, node, *tried)
            if says:
                return f"line {node.lineno} of your function changes nothing: {says}"
    return None


def _why_nothing_is_written(
    code: OwnCode,
    path: Path,
    node: ast.stmt,
    exercise: Exercise,
    cases: Sequence[Case],
    outcomes: Sequence[Outcome],
) -> str | None:
    """Why an assignment to a part changes nothing; None where it does, and no result shows it.

    Where a result is nan, whatever is written may make it nan again, and nothing is said.
    """
    numbers = [value for outcome in outcomes for value in outcome.results.values()]
    if any(isinstance(value, Tensor) and value.isnan().any() for value in numbers):
        return None
    target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    spoiled = ast.parse(f"{target} = float('nan')").body[0]
    with_nan = code.made(changed(code.tree, path, spoiled))
    if with_nan is not None and _does_the_same(with_nan, exercise, cases, outcomes):
        return "it goes into a copy that nothing reads"
    if not isinstance(node, ast.Assign):
        return None
    equal: list[bool] = []
    note = lambda old, new: equal.append(bool((torch.as_tensor(old) == torch.as_tensor(new)).all()))
    noted = ast.parse(f"_note({target}, {ast.unparse(node.value)})").body[0]
    noting = replace(code, namespace={**code.namespace, "_note": note})
    watched = noting.made(changed(code.tree, path, noted))
    if watched is None or not _does_the_same(watched, exercise, cases, outcomes):
        return None
    return "what it writes stands there already" if equal and all(equal) else None


def _compares_with_nan(tree: ast.Module) -> int | None:
    """The line of a comparison with nan by == or !=."""
    bound = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_nan(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            if any(_is_nan(side, bound) for side in (node.left, *node.comparators)):
                return node.lineno
    return None


def _is_nan(node: ast.AST, bound: set[str]) -> bool:
    written = ast.unparse(node).lower()
    return written in bound or written in ("float('nan')", "math.nan", "torch.nan", "np.nan", "nan")


def _suspects(tree: ast.Module, exercise: Exercise) -> Iterator[tuple[Path, ast.stmt, str]]:
    """Statements that may change nothing, and why; no words where that has to be tried."""
    for path, node in written_nodes(tree, exercise.methods):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).split(".")[-1]
            if name in GIVES_ANOTHER:
                yield path, node, f"{name} gives a new tensor, which is thrown away here"
        elif isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not isinstance(target, ast.Subscript):
                continue
            if isinstance(target.value, ast.Subscript):
                yield (
                    path,
                    node,
                    "an index by a list or a tensor makes a copy, and the second pair of brackets "
                    "writes into that copy: use one pair",
                )
            else:
                yield path, node, ""


def _does_the_same(
    fn: Answer, exercise: Exercise, cases: Sequence[Case], outcomes: Sequence[Outcome]
) -> bool:
    for case, outcome in zip(cases, outcomes, strict=True):
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                other = observe(exercise, fn, case, SECONDS_PER_STEP)
        except (Stopped, NotImplementedError):
            return False
        if compare_outcomes(outcome, other):
            return False
    return True
