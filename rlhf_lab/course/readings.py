"""Plain readings of the commonest errors.

Shapes that do not fit, by the names of their axes; an argument that is missing; None; an index out
of range; a truth value of many numbers.
"""

import inspect
import re
from collections.abc import Callable, Mapping

from torch import Tensor

from rlhf_lab.course.cases import array_type
from rlhf_lab.course.exercise import Case, Exercise

Read = Callable[[re.Match[str], "SizesByAxis"], str]


class SizesByAxis:
    """The names of the axes that have a size in a case, from the reference's annotations."""

    def __init__(self, exercise: Exercise, case: Case | None) -> None:
        self._names: dict[int, set[str]] = {}
        for name, size in _axes(exercise, case):
            self._names.setdefault(size, set()).add(name)

    def __call__(self, size: str) -> str:
        """A size with the name of its axis, where only one axis has it."""
        names = self._names.get(int(size), set())
        return f"{size} ({min(names)})" if len(names) == 1 else size

    def shape(self, written: str) -> str:
        """A shape such as "3, 4" or "3x4", with the names of its axes."""
        return f"[{', '.join(self(size) for size in re.findall(r'[0-9]+', written))}]"


def _axes(exercise: Exercise, case: Case | None) -> list[tuple[str, int]]:
    if case is None or inspect.isclass(exercise.reference):
        return []
    found = []
    hints = inspect.signature(inspect.unwrap(exercise.reference)).parameters
    for name, parameter in hints.items():
        value, kind = case.arguments.get(name), array_type(parameter.annotation)
        axes = kind.dim_str.split() if kind else []
        if isinstance(value, Tensor) and len(axes) == value.ndim:
            found += zip(axes, value.shape, strict=True)
    return [(axis, size) for axis, size in found if axis.isidentifier() and axis != "_"]


def read_error(exercise: Exercise, error: str, case: Case | None) -> str | None:
    """An error in words that say what to look at; None for one that says it by itself."""
    sizes = SizesByAxis(exercise, case)
    for pattern, read in READINGS.items():
        found = re.search(pattern, error, re.DOTALL)
        if found:
            return read(found, sizes)
    return None


def _of_return(found: re.Match[str], sizes: SizesByAxis) -> str:
    return f"what comes back is {_kind(found[1])}, and {_due(found[2])} is due"


def _of_parameter(found: re.Match[str], sizes: SizesByAxis) -> str:
    function, parameter = found[1].split(".")[-1], found[2]
    return f"{function} takes {parameter} as {_due(found[4])}, and is given {_kind(found[3])}"


def _kind(actual: str) -> str:
    """f32[3,4](torch) in words."""
    match = re.match(r"(\w+)\[([\d,]*)\]", actual.strip())
    if not match:
        return actual.strip()
    kinds = {"f": "floats", "i": "integers", "b": "True and False"}
    kind = kinds.get(match[1][0], match[1])
    if match[1] in ("f16", "bf16", "f64"):
        kind = {"f16": "half-precision", "bf16": "half-precision", "f64": "float64"}[match[1]]
        kind += " numbers"
    if not match[2]:
        return f"a single number ({kind})"
    return f"a tensor of shape [{match[2].replace(',', ', ')}] ({kind})"


def _due(expected: str) -> str:
    """Float[Tensor, 'batch gen'] in words."""
    match = re.match(
        r"(Float|Int|Bool)\[(?:Tensor|ndarray), ['\"]([^'\"]*)['\"]\]", expected.strip()
    )
    if not match:
        return expected.strip().rstrip(".")
    kind = {"Float": "floats", "Int": "integers", "Bool": "True and False"}[match[1]]
    axes = match[2].strip()
    return f"a tensor [{axes}] ({kind})" if axes else f"a single number ({kind})"


def _of_sizes(found: re.Match[str], sizes: SizesByAxis) -> str:
    one, two = sizes(found[1]), sizes(found[2])
    return (
        f"two tensors do not fit together: along axis {found[3]} one has {one} entries, the other "
        f"{two}. Axes are matched from the last one: add one by [..., None], or keep it (keepdim)"
    )


READINGS: Mapping[str, Read] = {
    r"checking the return value.*?Actual value: (.*?)\n.*?Expected type: (.*)": _of_return,
    r"checking the parameters of (\S+?)\.?\n.*?parameter '(\w+)'.*?Actual value: (.*?)\n"
    r".*?Expected type: (.*)": _of_parameter,
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton "
    r"dimension (\d+)": _of_sizes,
    r"mat1 and mat2 shapes cannot be multiplied \((\S+) and (\S+)\)": lambda m, s: (
        f"a matrix product of {s.shape(m[1])} and {s.shape(m[2])}: the last axis of the first must "
        "be as long as the last but one of the second"
    ),
    r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\) at "
    r"non-singleton dimension (\d+)": lambda m, s: (
        f"along axis {m[3]} a tensor has {s(m[2])} entries, and there is room for {s(m[1])}"
    ),
    r"shape mismatch: value tensor of shape \[([\d, ]*)\] cannot .* shape \[([\d, ]*)\]": (
        lambda m, s: f"a tensor of shape {s.shape(m[1])} is put into one of {s.shape(m[2])}"
    ),
    r"shape mismatch: indexing tensors could not be broadcast together with shapes (.*)": (
        lambda m, s: f"two indices of different lengths stand side by side ({m[1]})"
    ),
    r"The shape of the mask \[([\d, ]*)\] at index (\d+) does not match the shape of the indexed "
    r"tensor \[([\d, ]*)\]": lambda m, s: (
        f"a mask of shape {s.shape(m[1])} picks out of a tensor of shape {s.shape(m[3])}: it must "
        f"have the same axes, or stand at the one that it is about"
    ),
    r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)": lambda m, s: (
        f"entry {m[1]} is asked for along axis {m[2]}, which has {s(m[3])} entries, 0 to "
        f"{int(m[3]) - 1}"
    ),
    r"Dimension out of range .*in range of \[(-?\d+), (-?\d+)\], but got (-?\d+)": (
        lambda m, s: (
            f"axis {m[3]} is asked for, of a tensor that has {int(m[2]) + 1}: is an axis summed "
            "away already, or counted from 1?"
        )
    ),
    r"too many indices for tensor of dimension (\d+)": lambda m, s: (
        f"there are more indices than axes: the tensor has {m[1]}"
    ),
    r"Boolean value of Tensor with more than one value is ambiguous": lambda m, s: (
        "'if', 'and', 'or', 'not', min or max ask for one truth value, and a tensor has many: use "
        "torch.where, & | ~, torch.minimum or torch.maximum"
    ),
    r"missing (\d+) required positional arguments?: (.*?)(?: \(line|$)": lambda m, s: (
        f"a function is called without {m[2]}: see its signature"
    ),
    r"(\w+)\(\) got an unexpected keyword argument '(\w+)'": lambda m, s: (
        f"{m[1]} has no argument {m[2]}: see its signature"
    ),
    r"takes (?:from )?(\d+)(?: to \d+)? positional arguments? but (\d+) (?:were|was) given": (
        lambda m, s: f"a function that takes {m[1]} arguments is given {m[2]}"
    ),
    r"a leaf Variable that requires grad|modified by an inplace operation": lambda m, s: (
        "a tensor is changed in place that the gradient still needs: make a new one (x = x + ..., "
        "torch.where, .clone()) in place of x += ... or x[...] = ..."
    ),
    r"'-' operator, with (?:a|two) bool tensors? is not supported|"
    r"Subtraction, the `-` operator, with": lambda m, s: (
        "a mask of True and False is subtracted: invert it with ~, or make it numbers by .float()"
    ),
    r"bitwise_not_|bad operand type for unary ~|ufunc 'invert'": lambda m, s: (
        "~ inverts True and False, and stands before numbers here: is it a mask?"
    ),
    r"could not infer output dtype. Input dtype must be either a floating point.*Got: (\w+)": (
        lambda m, s: f"a mean or a standard deviation is taken of {m[1]}: make floats of it first"
    ),
    r"expected (?:m1 and m2|scalar type|both|.*) to have the same dtype|must have the same dtype, "
    r"but got|expected scalar type (\w+) "
    r"but found (\w+)": lambda m, s: (
        "two tensors of different precision meet in a product: bring both to one, by .double() or "
        ".float()"
    ),
    r"only one element tensors can be converted|a Tensor with (\d+) elements cannot be converted": (
        lambda m, s: (
            "float(), int() or .item() is asked of a tensor of many numbers: reduce it first"
        )
    ),
    r"does not require grad and does not have a grad_fn": lambda m, s: (
        "the gradient is asked of something that is cut off from the weights: look for no_grad, "
        "detach, .item() or a new tensor"
    ),
    r"Can't call numpy\(\) on Tensor that requires grad": lambda m, s: (
        "numpy cuts the gradient off: stay in torch"
    ),
    r"Sizes of tensors must match except in dimension (\d+). Expected size (\d+) but got size "
    r"(\d+)": lambda m, s: (
        f"tensors are put one behind the other along axis {m[1]}, and along another they have "
        f"{s(m[2])} and {s(m[3])} entries"
    ),
    r"Tensors must have same number of dimensions: got (\d+) and (\d+)": lambda m, s: (
        f"torch.cat joins tensors of {m[1]} and {m[2]} axes: give the smaller one its missing axis "
        "by [..., None] or [None]"
    ),
    r"zero-dimensional tensor.*cannot be concatenated": lambda m, s: (
        "torch.cat joins along an axis that is there, and single numbers have none: use torch.stack"
    ),
    r"shape '\[([-\d, ]*)\]' is invalid for input of size (\d+)": lambda m, s: (
        f"{m[2]} numbers do not fill the shape [{m[1]}]"
    ),
    r"Index tensor must have the same number of dimensions as input tensor": lambda m, s: (
        "gather takes an index with as many axes as the tensor: give the tokens a last axis by "
        "[..., None], and take it away again behind"
    ),
    r"Expected dtype int64 for index|tensors used as indices must be long": lambda m, s: (
        "floats stand where indices are due: take tokens or .argmax(), or .long()"
    ),
    r"(?:float )?division by zero": lambda m, s: (
        "a Python number is divided by 0: which of the arguments can make that difference 0?"
    ),
    r"'(?:float|int)' object has no attribute '(\w+)'": lambda m, s: (
        f".{m[1]} is asked of a Python number, which is no tensor"
    ),
    r"'NoneType' object|NoneType": lambda m, s: (
        "something is None here: an argument that may be left out, or a function without a return"
    ),
    r"singular|not positive-definite": lambda m, s: (
        "the matrix cannot be solved: add the ridge to its diagonal, and at least 1e-12"
    ),
    r"Expected (?:a |)type.*Float\[": lambda m, s: (
        "a tensor has another shape or type than promised"
    ),
}
"""By a pattern of the error: its reading."""


def returned_wrong_shape(error: str | None) -> bool:
    """Whether an error is that of the type check of what the answer itself returns."""
    return bool(error and "checking the return value of" in error)
