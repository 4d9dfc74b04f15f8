"""Test cases of an exercise: seeded arguments, drawn from the shapes in its annotations."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from rlhf_lab.functional import log_probs

Arguments = dict[str, Any]
Cases = dict[str, Arguments]  # by label
Sizes = Mapping[str, int]
USUAL = {"batch": 3, "gen": 4, "d_vocab": 5}


class Draws:
    """Random tensors, the same for one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> Tensor:
        """Draw from a standard normal distribution."""
        return torch.randn(shape, generator=self.generator, dtype=self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw integers below `high`."""
        return torch.randint(high, shape, generator=self.generator)


def standard_cases(
    fn: Callable[..., Any],
    *,
    large: Mapping[str, float] | None = None,
    sizes: Sizes | None = None,
    one_token: Sizes | None = None,
    spoil: Sequence[str] = (),
    impossible: Sequence[Sequence[str]] = (),
    half: Sequence[str] = (),
    optional: Sequence[str] = (),
    suffix: str = "",
    **given: Any,
) -> Cases:
    """Return the cases that every function over tokens must pass.

    1. Two ordinary ones of different sizes, then batch 1, then one generated token.
    2. With a mask over rows of different lengths, with gaps in it, and with a denominator, if these
       are arguments.
    3. Log-probs of all tokens are drawn as logits, and normalized at the end.

    Args:
        large: factors of arguments in a case with large numbers.
        sizes: sizes of axes, in addition to `USUAL`.
        one_token: the sizes with one token; {"gen": 1} if None.
        spoil: arguments that have nan (the first) or inf (the others) at padding in one case.
        impossible: in one case each, logits in which one token is -inf, as after top-k.
        half: arguments in half precision in one case.
        optional: arguments with a default that are drawn in the first four cases.
        suffix: end of all labels.
        given: arguments that are not drawn.
    """
    usual, one_token = USUAL | dict(sizes or {}), one_token or {"gen": 1}
    shapes = {
        "ordinary": usual,
        "other sizes": {name: size + 1 for name, size in usual.items()},
        "batch of 1": usual | {"batch": 1},
        "one token": usual | dict(one_token),
    }
    kinds = filter(None, map(array_type, get_type_hints(inspect.unwrap(fn)).values()))
    if not any(axis in kind.dim_str.split() for kind in kinds for axis in one_token):
        del shapes["one token"]
    cases = {
        name: draw(fn, s, seed, given, optional) for seed, (name, s) in enumerate(shapes.items())
    }
    parameters = inspect.signature(fn).parameters
    if "mask" in parameters:
        cases["masked"] = draw(fn, usual, 4, given, (*optional, "mask"))
        gaps = Draws(11).uniform(*cases["masked"]["mask"].shape) < 0.6
        cases["gaps in the mask"] = cases["masked"] | {"mask": gaps}
    if "denominator" in parameters:
        cases["with a denominator"] = draw(fn, usual, 5, given | {"denominator": 7}, optional)
    if large:
        drawn = draw(fn, usual, 6, given)
        scaled = {name: drawn[name] * factor for name, factor in large.items()}
        cases["large numbers"] = drawn | scaled
    if spoil:
        drawn = draw(fn, usual, 7, given, optional=("mask",))
        cases["nan and inf at padding"] = drawn | _spoiled(drawn, spoil)
    for names in impossible:
        drawn = draw(fn, {"batch": 2, "gen": 3, "d_vocab": 5}, 8)
        cut = {name: drawn[name].index_fill(-1, torch.tensor([1]), -torch.inf) for name in names}
        cases[f"one token has probability 0 in {' and '.join(names)}"] = drawn | cut
    if half:
        drawn = draw(fn, usual, 8, given)
        cases["half precision"] = drawn | {name: drawn[name].half() for name in half}
    return {label + suffix: _normalized(fn, arguments) for label, arguments in cases.items()}


def declared_cases(
    fn: Callable[..., Any], standard: Iterable[Mapping[str, Any]], literal: Mapping[str, Arguments]
) -> Cases:
    """Return cases of a TOML file: sets of options of `standard_cases`, then arguments by label.

    Lists are tensors where the function's annotation has a shape; floats are in float64.
    """
    hints, cases = inspect.get_annotations(inspect.unwrap(fn)), {}
    for options in standard:
        cases |= standard_cases(fn, **options)
    for label, arguments in literal.items():
        cases[label] = {
            name: torch.from_numpy(np.array(value)) if array_type(hints.get(name)) else value
            for name, value in arguments.items()
        }
    return cases


def _normalized(fn: Callable[..., Any], arguments: Arguments) -> Arguments:
    kinds = {name: array_type(hint) for name, hint in get_type_hints(inspect.unwrap(fn)).items()}
    has_vocab = lambda name: name.endswith("logprobs") and kinds[name].dim_str.endswith("d_vocab")
    return {name: log_probs(x) if has_vocab(name) else x for name, x in arguments.items()}


def _spoiled(arguments: Arguments, names: Sequence[str]) -> dict[str, Tensor]:
    padding = ~arguments["mask"]
    spoiled = {}
    for name in names:
        x = arguments[name]
        everywhere = padding.reshape(padding.shape + (1,) * (x.ndim - padding.ndim))
        spoiled[name] = x.masked_fill(everywhere, torch.inf if spoiled else torch.nan)
    return spoiled


def draw(
    fn: Callable[..., Any],
    sizes: Sizes,
    seed: int,
    given: Mapping[str, Any] | None = None,
    optional: Sequence[str] = (),
) -> Arguments:
    """Draw each tensor argument in the shape of its annotation.

    Floats are normal (noise and KL: uniform), tokens are below d_vocab, and masks are True up to a
    random length. Arguments with a default or without a shape are left out, unless they are in
    `given` or `optional`.
    """
    draws, inner = Draws(seed), inspect.unwrap(fn)
    hints, arguments = get_type_hints(inner), {}
    for name, parameter in inspect.signature(inner).parameters.items():
        kind = array_type(hints[name])
        if given and name in given:
            arguments[name] = given[name]
        elif kind and (name in optional or parameter.default is inspect.Parameter.empty):
            arguments[name] = _draw_one(name, kind, sizes, draws)
    return arguments


def array_type(hint: Any) -> Any:
    """Return the jaxtyping annotation in a hint, which may be optional, or None."""
    return next((c for c in (hint, *get_args(hint)) if hasattr(c, "dim_str")), None)


def _draw_one(name: str, kind: Any, sizes: Sizes, draws: Draws) -> Tensor:
    shape = tuple(sizes[axis] for axis in kind.dim_str.split())
    if kind.__name__.startswith("Int"):
        return draws.integers(sizes["d_vocab"], *shape)
    if name in ("noise", "uniforms", "kl"):
        return draws.uniform(*shape)
    if kind.__name__.startswith("Bool"):
        lengths = 1 + draws.integers(max(shape[-1] - 1, 1), *shape[:-1])
        lengths.view(-1)[0] = shape[-1]
        return torch.arange(shape[-1]) < lengths[..., None]
    return draws.normal(*shape)
