"""Advice on the most common errors of torch, Python and the shape checks."""

import re
from types import MappingProxyType

# by a pattern of the error: what to look at; groups of the pattern are filled in
ADVICE = MappingProxyType(
    {
        r"checking the return value.*?Actual value: (.*?)\n.*?Expected type: (.*)": (
            "the function returns {0}, expected {1}"
        ),
        r"checking the parameters of \w*?\.?(\w+)\.?\n.*?parameter '(\w+)'.*?Actual value: (.*?)\n"
        r".*?Expected type: (.*)": "{0} gets {2} as {1}, expected {3}",
        r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton "
        r"dimension (\d+)": (
            "two tensors do not fit: along axis {2} one has {0} entries, the other {1}. Axes are "
            "matched from the last one: add one with [..., None], or keep it with keepdim=True"
        ),
        r"shapes cannot be multiplied \((\S+) and (\S+)\)": (
            "in a matrix product of {0} and {1}, the last axis of the first must be as long as the "
            "second to last of the other"
        ),
        r"shape mismatch: (?:value tensor|indexing tensors)|shape of the mask|must match the "
        r"existing size": "an index or mask must have the shape of the tensor it selects from",
        r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)": (
            "index {0} does not exist along axis {1}, which has {2} entries"
        ),
        r"Dimension out of range|too many indices for tensor": (
            "the tensor has fewer axes than this: has a sum or mean removed one?"
        ),
        r"Boolean value of Tensor with more than one value": (
            "if, and, or, not, min and max need one truth value, and a tensor has many: use "
            "torch.where, & | ~, torch.minimum or torch.maximum"
        ),
        r"missing \d+ required positional arguments?: (.*?)(?: \(line|$)": (
            "a function is called without {0}: see its signature"
        ),
        r"got an unexpected keyword argument|positional arguments? but \d+ (?:were|was) given": (
            "a function is called with arguments that it does not have: see its signature"
        ),
        r"a leaf Variable that requires grad|modified by an inplace operation": (
            "the gradient still needs a tensor that is changed in place: make a new one with "
            "x = x + ..., torch.where or .clone() instead of x += ... or x[...] = ..."
        ),
        r"'-' operator, with (?:a|two) bool tensors?|the `-` operator, with": (
            "a mask of True and False is subtracted: invert it with ~, or convert it with .float()"
        ),
        r"bitwise_not_|bad operand type for unary ~|ufunc 'invert'": (
            "~ inverts True and False, and is applied to numbers: is it a mask?"
        ),
        r"could not infer output dtype": "a mean or standard deviation needs floats: use .float()",
        r"to have the same dtype|must have the same dtype, but got|expected scalar type": (
            "a product has two tensors of different precision: convert one with .double() or "
            ".float()"
        ),
        r"only one element tensors can be converted|elements cannot be converted": (
            "float(), int() or .item() is applied to a tensor of many numbers: reduce it first"
        ),
        r"does not require grad and does not have a grad_fn|Can't call numpy\(\) on Tensor": (
            "the gradient is cut off: look for no_grad, detach, .item(), numpy or a new tensor"
        ),
        r"Sizes of tensors must match|must have same number of dim|zero-dimensional tensor": (
            "torch.cat needs tensors of equal shape, except along its own axis: add an axis with "
            "[..., None], or use torch.stack"
        ),
        r"Index tensor must have the same number of dimensions": (
            "gather needs an index with as many axes as the tensor: give the tokens a last axis "
            "with [..., None], and remove it afterwards"
        ),
        r"Expected dtype int64 for index|tensors used as indices must be long": (
            "an index must be an integer: use tokens, .argmax() or .long()"
        ),
        r"division by zero": "a Python number is divided by 0: which arguments can make it 0?",
        r"'(?:float|int)' object has no attribute '(\w+)'": ".{0} is used on a Python number",
        r"NoneType": "a value is None: an optional argument, or a function without a return",
        r"singular|not positive-definite": (
            "the matrix cannot be solved: add the ridge to its diagonal, and at least 1e-12"
        ),
        r"Expected type:": "a value has another shape or type than its annotation",
    }
)


def error_advice(error: str) -> str | None:
    """Return what to look at after an error; None for errors that need no explanation."""
    for pattern, words in ADVICE.items():
        match = re.search(pattern, error, re.DOTALL)
        if match:
            return words.format(*match.groups())
    return None


def is_return_type_error(error: str | None) -> bool:
    """Return True for an error of the shape check on the learner's own return value."""
    return bool(error and "checking the return value of" in error)
