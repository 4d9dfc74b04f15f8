"""CUDA graphs: capture, and what a captured run depends on."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_lab.models.hooked_model import HOOK_STATE

Results = TypeVar("Results")
Key = tuple[list[Any], tuple]  # objects, compared by identity, and values
WARM_UPS = 2  # runs before the capture, in which libraries initialize themselves


def capture(run: Callable[[], Results], state: Sequence[Tensor] = ()) -> Callable[[], Results]:
    """Record `run`, which changes the tensors of `state`, and return a function that replays it."""
    before = [x.clone() for x in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
            for x, value in zip(state, before, strict=True):
                x.copy_(value)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> Results:
        graph.replay()
        return results

    return replay


def snapshot(*models: nn.Module) -> Key:
    """Return what a captured run depends on: attributes, methods and addresses of weights."""
    parts = [part for model in models for part in model.modules()]
    objects: list[Any] = [p for model in models for p in model.parameters()]
    addresses = [(p.data_ptr(), p.requires_grad) for p in objects]
    for part in parts:
        objects += [part, *part._buffers.values()]
        objects += [x for name, x in vars(part).items() if name not in HOOK_STATE]
    for kind in dict.fromkeys(kind for part in parts for kind in type(part).__mro__):
        objects += [kind, *vars(kind).values()]
    for cfg in {id(part.cfg): part.cfg for part in parts if "cfg" in vars(part)}.values():
        objects += vars(cfg).values()
    return objects, (addresses,)


def is_unchanged(key: Key, captured: Key) -> bool:
    (objects, values), (captured_objects, captured_values) = key, captured
    is_same = values == captured_values and len(objects) == len(captured_objects)
    return is_same and all(map(operator.is_, objects, captured_objects))
