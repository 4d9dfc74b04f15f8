"""Tensors of unequal shapes raise where torch would broadcast them silently."""

import inspect
import math
import types
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F

pytestmark = pytest.mark.usefixtures("no_type_checks")

Shapes = dict[str, tuple[int, ...]]
SETTINGS = {
    "vf_coef": 0.5, "clip": 0.2, "clip_coef": 0.2, "kl_coef": 0.3, "ent_coef": 0.1, "beta": 0.1,
    "cap": 2.0, "limit": 5.0, "kind": "k3", "reward_penalty": -1.0, "max_len": 9, "buffer": 2,
    "prefix_len": 1, "temperature": 1.0, "moments": F.RunningMoments(), "stop_tokens": (1,),
    "pad_token": 0, "estimator": lambda values: values, "objective": "ppo", "center_coef": 0.1,
    "reference_point": 0.5, "odds_weight": 0.1, "n": 2, "n_bins": 2, "reward": -0.5, "kl": 0.1,
}  # fmt: skip
NEEDS = {"old_values": "clip", "kl_per_token": "kl_coef"}
# one number per sequence is as good as one per token, or a number as a tensor
BY_DESIGN = {("compute_advantages", "rewards"), ("token_rewards", "rewards")}
BY_DESIGN |= {("bradley_terry_loss", "margin")}
# only the number of rows is known from the other tensors
BY_DESIGN |= {(name, "mask") for name in ("finished_mask", "flawed_responses", "opo_advantages")}
BY_DESIGN |= {("reinforce_plus_plus_baseline_advantages", "mask"), ("token_rewards", "mask")}
BY_DESIGN |= {("remax_advantages", "token_rewards")}


def tensor_axes(function: Any) -> dict[str, tuple[str, ...]]:
    """Return the axes of each parameter that is a tensor, the most of them if there is a choice."""
    axes = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        named = [tuple(k.dim_str.split()) for k in kinds if hasattr(k, "dim_str")]
        found = [n for n in named if not any("*" in axis or "." in axis for axis in n)]
        if found and max(map(len, found)):
            axes[name] = max(found, key=len)
    return axes


FUNCTIONS = {
    name: function
    for name, function in vars(F).items()
    if inspect.isfunction(function) and len(tensor_axes(function)) > 1
}


def make(name: str, shape: tuple[int, ...], annotation: Any) -> Tensor:
    if "Bool" in str(annotation):
        return torch.ones(shape, dtype=torch.bool)
    if "Int" in str(annotation):
        return torch.zeros(shape, dtype=torch.long)
    if name == "probs":  # they sum to 1
        return torch.full(shape, 1 / math.prod(shape))
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(len(name)))
    return numbers if name == "uniforms" else -numbers


def call(name: str, shapes: Shapes) -> Any:
    """Call a function with tensors of these shapes; it gets no other tensor."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    arguments = {key: value for key, value in SETTINGS.items() if key in parameters}
    arguments |= {"kind": "sigmoid"} if name == "dpo_loss" else {}
    for key in tensor_axes(FUNCTIONS[name]).keys() - shapes.keys():
        arguments.pop(NEEDS.get(key), None)
    arguments |= {key: make(key, x, parameters[key].annotation) for key, x in shapes.items()}
    return FUNCTIONS[name](**arguments)


def right_shapes(name: str) -> Iterator[Shapes]:
    """Yield the shapes of all tensors of a function, and of the required ones only."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    for batch in (2, 3):
        sizes = dict.fromkeys(("batch", "prompts", "pair", "seeds"), batch)
        sizes |= dict.fromkeys(("gen", "seq", "samples", "point", "outcome"), 3)
        sizes |= {"d_vocab": 5, "parameters": 4}
        shapes = {
            k: tuple(sizes[a] for a in axes) for k, axes in tensor_axes(FUNCTIONS[name]).items()
        }
        yield shapes
        yield {k: shape for k, shape in shapes.items() if parameters[k].default is not None}


def wrong_shapes(name: str, shapes: Shapes) -> Iterator[tuple[str, Shapes]]:
    """Yield shapes of which one could be broadcast against the others by mistake."""
    for key, right in shapes.items():
        tried = {right[1:], right[:-1], (1,) * len(right), (*right, 1), (1, *right)}
        tried |= {right[:i] + (1,) + right[i + 1 :] for i in range(len(right))}
        for wrong in tried - {right}:
            changed = shapes | {key: wrong}
            if (name, key) not in BY_DESIGN and not consistent(name, changed):
                yield key, changed


def consistent(name: str, shapes: Shapes) -> bool:
    """Return True if the shapes agree after all, for a batch of other sizes."""
    axes, bound = tensor_axes(FUNCTIONS[name]), {}
    if len(shapes) == 1:
        return True
    for key, shape in shapes.items():
        if len(shape) != len(axes[key]):
            return False
        if any(bound.setdefault(a, n) != n for a, n in zip(axes[key], shape, strict=True)):
            return False
    return True


def test_functions_with_two_tensors_are_all_tried():
    assert len(FUNCTIONS) > 35


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_shape_is_broadcast_silently(name):
    silent = []
    for shapes in right_shapes(name):
        call(name, shapes)
        for key, changed in wrong_shapes(name, shapes):
            try:
                call(name, changed)
            except Exception:  # torch's own or ours
                continue
            silent.append((key, changed))
    assert not silent


def test_margins_and_rewards_raise_on_other_shapes():
    pairs, tokens = torch.zeros(3), torch.zeros(3, 3)
    for margin in (torch.zeros(1), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="margin has shape"):
            F.bradley_terry_loss(pairs, pairs, margin)
    for rewards in (torch.zeros(1), torch.zeros(1, 3), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="rewards has shape"):
            F.compute_advantages(tokens, rewards)


def test_losses_of_pairs_raise_on_numbers_per_token():
    tokens, good = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    for what, call in {
        "pair": lambda: F.dpo_loss(tokens, tokens, tokens, tokens, 0.1),
        "response": lambda: F.kto_loss(tokens, tokens, good, 0.0, 0.1),
    }.items():
        with pytest.raises(
            ValueError, match=rf"Each {what} must have one number, got shape \(3, 3"
        ):
            call()
