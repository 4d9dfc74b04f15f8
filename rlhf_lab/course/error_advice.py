"""Advice on the most common errors of torch, Python and the shape checks."""

import re
from collections.abc import Mapping

# by a pattern of the error: what to look at; groups of the pattern are filled in
ADVICE: Mapping[str, str] = {
    r"checking the return value.*?Actual value: (.*?)\n.*?Expected type: (.*)": (
        "the function returns {0}, expected {1}"
    ),
    r"checking the parameters of \w*?\.?(\w+)\.?\n.*?parameter '(\w+)'.*?Actual value: (.*?)\n"
    r".*?Expected type: (.*)": "{0} gets {2} as {1}, expected {3}",
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton "
    r"dimension (\d+)": (
        "two tensors have incompatible shapes: axis {2} has {0} entries in one, and {1} in the "
        "other. Axes are matched from the last: add one with [..., None], or use keepdim=True"
    ),
    r"shapes cannot be multiplied \((\S+) and (\S+)\)": (
        "in a matrix product of {0} and {1}, the last axis of the first must be as long as the "
        "second-to-last axis of the second"
    ),
    r"shape mismatch: (?:value tensor|indexing tensors)|shape of the mask|must match the "
    r"existing size": "an index or mask must have the shape of the tensor it selects from",
    r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)": (
        "index {0} does not exist along axis {1}, which has {2} entries"
    ),
    r"Dimension out of range|too many indices for tensor": (
        "the tensor has fewer axes than expected: has a sum or mean removed one?"
    ),
    r"Boolean value of Tensor with more than one value": (
        "if, and, or, not, min and max need a single truth value, but a tensor has many: use "
        "torch.where, & | ~, torch.minimum or torch.maximum"
    ),
    r"missing a required argument: 'inputs'|unexpected keyword argument 'hook'": (
        "torch's hooks get (module, inputs, output), but those in fwd_hooks get (activation, hook)"
    ),
    r"missing (?:\d+ required positional|a required) argument|unexpected keyword argument|"
    r"too many positional|positional arguments? but \d+ w": (
        "a function is called with arguments that do not match its signature"
    ),
    r"a leaf Variable that requires grad|modified by an inplace operation": (
        "a tensor is changed in place, but the gradient still needs it: make a new one with "
        "x = x + ..., torch.where or .clone() instead of x += ... or x[...] = ..."
    ),
    r"'-' operator, with (?:a|two) bool tensors?|the `-` operator, with": (
        "a mask cannot be subtracted: invert it with ~, or convert it with .float()"
    ),
    r"bitwise_not_|bad operand type for unary ~|ufunc 'invert'": (
        "~ only inverts masks, but here it is applied to numbers"
    ),
    r"could not infer output dtype": "a mean or standard deviation needs floats: use .float()",
    r"to have the same dtype|must have the same dtype, but got|expected scalar type": (
        "an operation combines two tensors of different precision: convert one of them with "
        ".double() or .float()"
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
    r"division by zero": "a Python number is divided by 0: which arguments cause this?",
    r"'(?:float|int)' object has no attribute '(\w+)'": "only a tensor has .{0}, not a number",
    r"NoneType": "a value is None: is it an optional argument, or is a return missing?",
    r"singular|not positive-definite": (
        "the matrix is singular: add the ridge to its diagonal, and at least 1e-12"
    ),
    r"Expected type:": "a value does not have the shape or type of its annotation",
}


def error_advice(error: str) -> str | None:
    """Return what to look at after an error; None for errors that need no explanation."""
    for pattern, words in ADVICE.items():
        match = re.search(pattern, error, re.DOTALL)
        if match:
            return words.format(*match.groups())
    return None
