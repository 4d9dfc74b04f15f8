"""Tensors of unequal shapes are refused in a sentence where torch would broadcast them silently."""

import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional

pytestmark = pytest.mark.usefixtures("no_type_checks")

SETTINGS = {
    "vf_coef": 0.5,
    "clip": 0.2,
    "clip_coef": 0.2,
    "kl_coef": 0.3,
    "ent_coef": 0.1,
    "beta": 0.1,
    "cap": 2.0,
    "limit": 5.0,
    "kind": "k3",
    "reward_penalty": -1.0,
    "max_len": 9,
    "buffer": 2,
    "prefix_len": 1,
    "temperature": 1.0,
    "moments": functional.RunningMoments(),
    "stop_tokens": (1,),
    "pad_token": 0,
    "estimator": lambda values: values,
    "objective": "ppo",
    "center_coef": 0.1,
    "reference_point": 0.5,
    "odds_weight": 0.1,
    "n": 2,
    "n_bins": 2,
    "reward": -0.5,
    "kl": 0.1,
}
"""Of parameters that hold no tensor, and do not do without one or would be left out."""

OWN_KIND = {"dpo_loss": "sigmoid"}
BY_DESIGN = {
    ("compute_advantages", "rewards"),
    ("token_rewards", "rewards"),
    ("bradley_terry_loss", "margin"),
}
"""One number per sequence where one per token is as good, and a number where a tensor is."""

OF_ANY_RANK = {
    ("finished_mask", "mask"),
    ("flawed_responses", "mask"),
    ("opo_advantages", "mask"),
    ("reinforce_plus_plus_baseline_advantages", "mask"),
    ("remax_advantages", "token_rewards"),
    ("token_rewards", "mask"),
}
"""Of what stands beside them, only the number of rows is known."""


def axes_of(annotation: Any) -> tuple[str, ...] | None:
    """The axes of a parameter that is a tensor, the most of them where there is a choice."""
    choices = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    named = [c.dim_str.split() for c in choices if hasattr(c, "dim_str")]
    found = [tuple(axes) for axes in named if not any("*" in a or "." in a for a in axes)]
    return max(found, key=len, default=None)


def tensor_parameters(function: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """The names of a function's tensors and their axes."""
    parameters = inspect.signature(function).parameters
    found = {name: axes_of(p.annotation) for name, p in parameters.items()}
    return {name: axes for name, axes in found.items() if axes}


def wrong_shapes(right: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes that broadcast against the right one, or could do so by a mistake."""
    tried = {right[1:], right[:-1], (1,) * len(right), (*right, 1), (1, *right)}
    tried |= {right[:i] + (1,) + right[i + 1 :] for i in range(len(right))}
    yield from sorted(tried - {right})


def make(name: str, shape: tuple[int, ...], annotation: Any) -> Tensor:
    """A tensor for the parameter of that name."""
    generator = torch.Generator().manual_seed(len(name))
    written = str(annotation)
    if "Bool" in written:
        return torch.ones(shape, dtype=torch.bool)
    if "Int" in written:
        return torch.zeros(shape, dtype=torch.long)
    if name == "probs":  # which sum to 1
        return torch.full(shape, 1 / math.prod(shape))
    return -torch.rand(shape, generator=generator)


def cases() -> Iterator[tuple[str, str, tuple[int, ...], dict[str, int]]]:
    """Each function with two tensors, the one of them that is wrong, and its shape."""
    for name, function in vars(functional).items():
        if not inspect.isfunction(function) or name.startswith("_"):
            continue
        tensors = tensor_parameters(function)
        if len(tensors) < 2:
            continue
        for sizes in ({"batch": 2, "gen": 3}, {"batch": 3, "gen": 3}):
            sizes = sizes | {"seq": sizes["gen"], "d_vocab": 5, "outcome": 3, "parameters": 4}
            sizes |= {"prompts": sizes["batch"], "samples": sizes["gen"], "pair": sizes["batch"]}
            sizes |= {"seeds": sizes["batch"], "point": sizes["gen"]}
            for parameter, axes in tensors.items():
                for shape in wrong_shapes(tuple(sizes[axis] for axis in axes)):
                    yield name, parameter, shape, sizes


def call(
    name: str, wrong: str, shape: tuple[int, ...], sizes: dict[str, int], left_out: bool = False
) -> Any:
    """The result of a function whose arguments are right but for one shape.

    `left_out`: without the tensors that are optional, unless it is the wrong one.
    """
    function = getattr(functional, name)
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in SETTINGS.items() if key in parameters}
    if name in OWN_KIND:
        given["kind"] = OWN_KIND[name]
    for key, axes in tensor_parameters(function).items():
        right = tuple(sizes[axis] for axis in axes)
        if left_out and key != wrong and parameters[key].default is None:
            given.pop({"old_values": "clip", "kl_per_token": "kl_coef"}.get(key), None)
            continue
        given[key] = make(key, shape if key == wrong else right, parameters[key].annotation)
    return function(**given)


def agree(name: str, wrong: str, shape: tuple[int, ...], sizes: dict[str, int], left_out: bool):
    """Whether the shapes of a call are right after all, for a batch of other sizes."""
    parameters, bound = inspect.signature(getattr(functional, name)).parameters, {}
    for key, axes in tensor_parameters(getattr(functional, name)).items():
        if left_out and key != wrong and parameters[key].default is None:
            continue
        found = shape if key == wrong else tuple(sizes[axis] for axis in axes)
        if len(found) != len(axes):
            if key == wrong and not others(name, wrong, left_out):
                return True
            return False
        if any(
            bound.setdefault(axis, size) != size for axis, size in zip(axes, found, strict=True)
        ):
            return False
    return True


def others(name: str, wrong: str, left_out: bool) -> set[str]:
    """The other tensors of a call."""
    function = getattr(functional, name)
    parameters = inspect.signature(function).parameters
    found = set(tensor_parameters(function)) - {wrong}
    return {key for key in found if not (left_out and parameters[key].default is None)}


CASES = list(cases())


def test_every_function_with_two_tensors_is_tried_and_runs_with_the_right_shapes():
    assert len({name for name, *_ in CASES}) > 35
    for name, sizes in {(name, tuple(sizes.items())) for name, _, _, sizes in CASES}:
        call(name, "", (), dict(sizes))
        call(name, "", (), dict(sizes), left_out=True)


@pytest.mark.parametrize("function", sorted({name for name, *_ in CASES}))
def test_no_shape_is_broadcast_silently(function):
    silent = []
    for name, parameter, shape, sizes in CASES:
        if name != function or (name, parameter) in BY_DESIGN | OF_ANY_RANK:
            continue
        for left_out in (False, True):
            if agree(name, parameter, shape, sizes, left_out):
                continue
            try:
                call(name, parameter, shape, sizes, left_out)
            except Exception:  # torch's own, or a sentence
                continue
            silent.append((parameter, shape, sizes, left_out))
    assert not silent


def test_margin_and_rewards_have_the_shapes_that_are_meant():
    pairs, tokens = torch.zeros(3), torch.zeros(3, 3)
    for margin in (torch.zeros(1), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="margin has shape"):
            functional.bradley_terry_loss(pairs, pairs, margin)
    for rewards in (torch.zeros(1), torch.zeros(1, 3), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="rewards has shape"):
            functional.compute_advantages(tokens, rewards)


def test_the_sentence_names_both_tensors_and_both_shapes():
    with pytest.raises(ValueError) as caught:
        functional.calc_value_function_loss(torch.zeros(2, 3), torch.zeros(3), 0.5)
    assert str(caught.value) == (
        "returns has shape (3,), expected (2, 3) to match values. Pass tensors of the same shape, "
        "which are never broadcast here."
    )


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_no_token_and_no_sequence_have_no_advantages(shape):
    values, mask = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
    for advantages in (
        functional.compute_gae(values, values, mask=mask),
        functional.compute_advantages(values, torch.zeros(shape[:1]), mask),
        functional.rewards_to_go(values, 1.0, mask),
    ):
        assert advantages.shape == shape
        assert advantages.dtype == torch.float64
