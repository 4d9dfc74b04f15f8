"""CUDA graphs: capture, hooks between them, and what a captured run depends on."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HOOK_STATE, without_hooks
from rlhf_lab.models.hooked_transformer import HookPoint

Results = TypeVar("Results")
Key = tuple[list[Any], tuple]  # objects, compared by identity, and values
MAX_GRADIENT_ERROR = 1e-3  # relative difference of the first replayed gradient from autograd's
WARM_UPS = 2  # runs before the capture, in which libraries initialize themselves


def capture(
    run: Callable[[], Results], state: Sequence[Tensor] = (), points: Sequence[HookPoint] = ()
) -> Callable[[], Results]:
    """Record `run`, which changes the tensors of `state`, and return a function that replays it.

    The hooks of `points` are not recorded: a replay calls them, between two graphs.
    """
    before = [x.clone() for x in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), replaced_hooks(points, lambda point, x: x):
        for _ in range(WARM_UPS):
            run()
            for x, value in zip(state, before, strict=True):
                x.copy_(value)
    torch.cuda.current_stream().wait_stream(stream)
    pool, contexts = torch.cuda.graph_pool_handle(), []

    def start() -> None:
        contexts.append(torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool))
        contexts[-1].__enter__()

    def stop() -> Callable[[], None]:
        contexts[-1].__exit__(None, None, None)
        return contexts[-1].cuda_graph.replay

    return record(run, points, start, stop)


def verified_capture(
    run: Callable[[], tuple[Results, list[Tensor | None]]], capture: Callable
) -> tuple[Callable[[], tuple[Results, list[Tensor | None]]] | None, str | None]:
    """Return the replay of a run, or None and an error: it must return the run's gradients."""
    try:
        expected = [x for x in run()[1] if x is not None]
        replay = capture(run)
        found = [x for x in replay()[1] if x is not None]
    except RuntimeError as failure:
        return None, f"the capture failed ({failure})"
    difference = torch.nn.utils.get_total_norm(torch._foreach_sub(found, expected))
    if difference <= MAX_GRADIENT_ERROR * torch.nn.utils.get_total_norm(expected):
        return replay, None
    return None, "a replayed gradient differs from autograd's"


def record(
    run: Callable[[], Results],
    points: Sequence[HookPoint],
    start: Callable[[], None],
    stop: Callable[[], Callable[[], None]],
) -> Callable[[], Results]:
    """Record `run` in pieces that end at hook points, and return a function that replays it.

    `start` begins a piece; `stop` ends it and returns its replay. Later pieces read a copy of the
    activation, into which a replay writes what the hooks return.
    """
    steps: list[Callable[[], Any]] = []

    def cut(point: HookPoint, x: Tensor) -> Tensor:
        steps.append(stop())
        changed = x.clone()
        steps.append(partial(run_hooks, point, x, changed))
        start()
        return changed

    with replaced_hooks(points, cut):
        start()
        try:
            results = run()
        finally:
            steps.append(stop())

    def replay() -> Results:
        for step in steps:
            step()
        return results

    return replay


def run_hooks(point: HookPoint, x: Tensor, changed: Tensor) -> None:
    result = point(x)
    if (result.shape, result.dtype) != (x.shape, x.dtype):
        raise ConfigError(
            f"A hook at {point.name!r} returned {tuple(result.shape)} and {result.dtype}, and the "
            f"activation is {tuple(x.shape)} and {x.dtype}. Convert it, or set cuda_graphs=False."
        )
    changed.copy_(result)


@contextlib.contextmanager
def replaced_hooks(
    points: Sequence[HookPoint], function: Callable[[HookPoint, Tensor], Tensor]
) -> Iterator[None]:
    """Return a context in which hook points call a function instead of their hooks."""
    with without_hooks(*points):
        for point in points:
            point.register_forward_hook(lambda point, inputs, x: function(point, x))
        yield


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
