"""Wording of source code: an expression by its arguments and quantities, an operation by its noun.

It describes what a construct is about, so that a learner who wrote another one understands, and
does not quote the line.
"""

import ast
import re

LONGEST = 44
NOUNS = {
    "mean": "the mean",
    "masked_mean": "the masked mean",
    "sum": "the sum",
    "prod": "the product",
    "amax": "the largest",
    "amin": "the smallest",
    "std": "the standard deviation",
    "masked_std": "the standard deviation",
    "masked_var": "the variance",
    "var": "the variance",
    "exp": "the exponential",
    "expm1": "the exponential less 1",
    "log": "the logarithm",
    "log2": "the logarithm to the base 2",
    "log10": "the logarithm to the base 10",
    "log1p": "the logarithm of 1 more",
    "sqrt": "the root",
    "square": "the square",
    "abs": "the absolute value",
    "softmax": "the softmax",
    "log_softmax": "the log_softmax",
    "logsumexp": "the logsumexp",
    "sigmoid": "the sigmoid",
    "cumsum": "the running sum",
    "minimum": "the smaller",
    "maximum": "the larger",
    "min": "the smallest",
    "max": "the largest",
    "argmax": "the place of the largest",
    "argmin": "the place of the smallest",
    "norm": "the length",
    "diagonal": "the diagonal",
    "any": "'any'",
    "all": "'all'",
}
KEPT = frozenset(
    {"float", "double", "to", "detach", "clone", "at_least_float32", "exact", "zero_masked", "item"}
    | {"long", "reshape", "expand", "expand_as", "flatten", "tolist", "list", "contiguous", "tuple"}
)
"""What leaves a quantity what it is."""
SAYS_LEFT_OUT = {
    "detach": "{x} were not detached, so that the gradient flows through it, too",
    "clone": "{x} itself were changed, and not a copy",
    "clamp": "{x} were not clamped",
    "clip": "{x} were not clipped",
    "at_least_float32": "{x} stayed in half precision",
    "exact": "{x} stayed in its own precision",
    "zero_masked": "{x} were not put to 0 where the mask is False",
    "masked_fill": "nothing were filled into {x}",
    "flip": "{x} were not turned round",
    "reversed": "this went forward and not backward",
    "item": "tensors came back, and not numbers",
    "float": "{x} stayed in its own precision",
    "double": "{x} stayed in its own precision",
    "abs": "{x} kept its sign",
}
OPERATIONS = frozenset(
    {"where", "minimum", "maximum", "cat", "stack", "zip", "min", "max", "range"}
)


class Wording:
    """Words for the expressions of one function or class.

    Args:
        own: the reader wrote it, and knows its variables by their names.
    """

    def __init__(self, tree: ast.Module, own: bool = False) -> None:
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        arguments = [a for f in functions for a in (*f.args.args, *f.args.kwonlyargs)]
        self._kinds = {
            a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation is not None
        }
        stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
        self._own = dict.fromkeys(n.id for n in stored if isinstance(n.ctx, ast.Store))
        self._is_readers_own = own
        texts = [ast.get_docstring(f) or "" for f in functions]
        self._told = set(re.findall(r"[a-z]{3,}", " ".join(texts).lower()))
        self._values: dict[str, ast.AST] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._values.setdefault(node.targets[0].id, node.value)

    def of(self, node: ast.AST) -> str:
        """An expression in words; a long one by what it is made of."""
        said = self._of(node)
        return said if len(said) <= LONGEST else self._made_of(node)

    def _made_of(self, node: ast.AST) -> str:
        """An expression by what goes into it."""
        names = self._names(node)
        if len(names) < 2:
            return f"what is made of {names[0]}" if names else "a part"
        more = f", {names[1]}" if len(names) > 2 else ""
        return f"the part with {names[0]}{more} and {names[min(2, len(names) - 1)]}"

    def _names(self, node: ast.AST) -> list[str]:
        """The arguments and told quantities in an expression, also by way of its variables."""
        found: dict[str, None] = {}
        for part in ast.walk(node):
            if not isinstance(part, ast.Name):
                continue
            if part.id in self._kinds or (part.id in self._own and self._is_told(part.id)):
                found[self.quantity(part.id)] = None
            elif part.id in self._values:
                value = self._values.pop(part.id)
                found |= dict.fromkeys(self._names(value))
                self._values[part.id] = value
        return list(found)

    def _of(self, node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return self.quantity(node.id)
        if isinstance(node, ast.Constant):
            return f"{node.value!r}"
        if isinstance(node, ast.Attribute):
            if node.attr in ("T", "mT", "shape", "device", "dtype", "functions", "args"):
                return self._of(node.value)
            return node.attr.replace("_", " ")
        if isinstance(node, ast.Subscript | ast.Starred):
            return self._of(node.value)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.UnaryOp):
            sign = {ast.USub: "minus ", ast.Invert: "not ", ast.Not: "not "}
            return sign.get(type(node.op), "") + self._of(node.operand)
        if isinstance(node, ast.BinOp):
            words = {ast.Add: "plus", ast.Sub: "less", ast.Mult: "times", ast.Div: "over"}
            word = words.get(type(node.op), "with")
            left, right = self._of(node.left), self._of(node.right)
            if max(len(left), len(right)) > LONGEST // 2:
                return self._made_of(node)
            return f"{left} {word} {right}"
        return " and ".join(self._names(node)) or "it"

    def _of_call(self, node: ast.Call) -> str:
        name = self.name_of_call(node)
        inner = self.inner(node)
        if inner is None:
            return f"what {name} gives"
        if name in KEPT:
            return self._of(inner)
        if name in ("zeros_like", "zeros", "new_zeros"):
            return "0"
        if name in ("ones_like", "ones"):
            return "1"
        if name in NOUNS:
            said = self._of(inner)
            return f"{NOUNS[name]} of {said if ' of ' not in said else self._made_of(inner)}"
        return f"the {_spaced(name)}"

    def quantity(self, name: str) -> str:
        """An argument by its name, anything else by words of the docstring or by what it is."""
        if name in self._kinds:
            return name
        if self._is_readers_own:
            return name
        if name not in self._own or self._is_told(name):
            return f"the {_spaced(name)}"
        value = self._values.pop(name, None)
        if value is None:
            return f"the {_spaced(name)}"
        said = self._of(value)
        self._values[name] = value
        return said

    def _is_told(self, name: str) -> bool:
        return self._is_readers_own or set(_spaced(name).split()) <= self._told

    def noun(self, name: str) -> str:
        """What a function gives."""
        return NOUNS.get(name, name)

    def name_of_call(self, node: ast.Call) -> str:
        """The last part of what is called."""
        return re.split(r"\W", ast.unparse(node.func))[-1]

    def is_method(self, node: ast.Call) -> bool:
        """Whether a call is one of a quantity, and not of a module's function."""
        func = node.func
        modules = ("torch", "F", "einops", "np", "nn")
        if not isinstance(func, ast.Attribute):
            return False
        return ast.unparse(func.value).split(".")[0] not in modules

    def inner(self, node: ast.Call) -> ast.AST | None:
        """What is called upon, or handed in first."""
        return node.func.value if self.is_method(node) else next(iter(node.args), None)

    def is_operation(self, name: str) -> bool:
        """Whether a function needs all of its arguments."""
        return name in OPERATIONS or name in KEPT

    def without(self, node: ast.Call) -> str:
        """What happens where a call is left out."""
        name, inner = self.name_of_call(node), self.inner(node)
        said = "it" if inner is None else self.of(inner)
        if name in SAYS_LEFT_OUT:
            return SAYS_LEFT_OUT[name].format(x=said)
        if name in NOUNS:
            return f"{NOUNS[name]} of {said} were not taken"
        return f"{said} were taken without {_spaced(name)}"

    def alike(self, name: str) -> list[str]:
        """Other names that could stand in the place of one: arguments of its kind, quantities."""
        if name in self._kinds:
            kind = self._kinds[name].replace(" | None", "")
            same = [n for n, k in self._kinds.items() if k.replace(" | None", "") == kind]
            return [n for n in same if n != name]
        if name in self._own and self._is_told(name):
            return [n for n in self._own if n != name and self._is_told(n)]
        return []

    def condition(self, test: ast.AST) -> str:
        """A condition as the end of "that ..."."""
        return f"the condition on {self.of(test)} decides"

    def step(self, statement: ast.stmt) -> str | None:
        """A statement that can be left out: a call, or a quantity worked out of itself."""
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return f"the call of {self.name_of_call(statement.value)}"
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            used = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
            if name in used:
                return f"the last step on {self.quantity(name)}"
        if isinstance(statement, ast.If) and not statement.orelse:
            return f"the step that depends on {self.of(statement.test)}"
        return None


def _spaced(name: str) -> str:
    return name.strip("_").replace("_", " ")
