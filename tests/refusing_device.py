"""A stand-in for MPS on any machine: a device that rejects what MPS rejects.

Its tensors are a wrapper subclass: torch's CPU kernels compute on the wrapped tensors, so every
number is the CPU's, while `x.device` is "mps" and every operation passes `_run_kernel`. While a
`RefusingDevice` is entered, `device="mps"` makes such tensors. Rejected are
- float64 on the device;
- operations without an MPS kernel in the native_functions.yaml of the installed torch;
- tensors of two devices in one operation, and a generator of another device;
- causal attention in half precision, where queries can see later keys (pytorch issue 195910).

It does not show other rounding of MPS kernels, wrong kernels, or kernels of some dtypes only.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchgen
import yaml
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

DEVICE = torch.device("mps")
HOST = torch.device("cpu")
DOUBLE = (torch.float64, torch.complex128)
ANYWHERE = {
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
MPS_ATTENTION = "_scaled_dot_product_attention_math_for_mps"
# operations of a CPU, and those that torch runs on MPS instead
STANDS_FOR = dict.fromkeys(["_fused_sdp_choice", ATTENTION, f"{ATTENTION}_backward"], MPS_ATTENTION)
INDEXING = ("copy_", "index", "index_put", "index_put_")
ENGINE = torch.autograd._engine_run_backward


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `held` is the CPU tensor with its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
        )
        made.held = held
        return made

    device = property(lambda self: DEVICE)
    is_cpu = property(lambda self: False)
    is_mps = property(lambda self: True)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run_kernel(func, args, kwargs or {})


class DeviceGenerator(torch.Generator):
    """Replacement of torch.Generator; on the device it has the numbers of the CPU's."""

    def __new__(cls, device: str | torch.device = HOST) -> torch.Generator:
        if torch.device(device).type != DEVICE.type:
            return torch._C.Generator(device)
        return super().__new__(cls, HOST)

    device = property(lambda self: DEVICE)


class RefusingDevice:
    """Context in which the device exists; `refused` lists its errors, also caught ones."""

    entered: "RefusingDevice | None" = None

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "RefusingDevice":
        enter = self._stack.enter_context
        enter(mock.patch.object(RefusingDevice, "entered", self))
        enter(mock.patch.object(torch, "Generator", DeviceGenerator))
        enter(mock.patch.object(torch.backends.mps, "is_available", lambda: True))
        enter(mock.patch.object(torch.backends.mps, "is_macos_or_newer", lambda *version: True))
        enter(mock.patch.object(torch.mps, "driver_allocated_memory", lambda: 0))
        enter(mock.patch.object(torch.autograd, "_engine_run_backward", _run_backward))
        # `module.to` keeps the parameter object and replaces its contents
        enter(mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True))
        enter(_Placing())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class _Placing(TorchFunctionMode):
    """Routes every function of torch to `_call`, also those without tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


def on_device(x: Tensor) -> DeviceTensor:
    """Copy a host tensor to the device."""
    _check_dtype(x)
    return DeviceTensor(x.detach().clone())


def _reject(error: type[Exception], message: str) -> None:
    if RefusingDevice.entered is not None:
        RefusingDevice.entered.refused.append(message)
    raise error(message)


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return on_device(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.held.clone()


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.held.clone()

    @staticmethod
    def backward(ctx, grad):
        return on_device(grad)


def _move(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor so that its gradient moves back."""
    if x.device.type == device.type:
        return x
    return (_ToDevice if device.type == DEVICE.type else _ToHost).apply(x)


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, in all its forms."""
    if args and isinstance(args[0], Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        copy = kwargs.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if copy:
            x = x.clone()
    if device is not None and device.type == HOST.type:
        x = _move(x, device)
    if dtype is not None and dtype != x.dtype:
        x = x.type(dtype)
    return x if device is None else _move(x, device)


def _call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch, which may move its result or create it on the device."""
    with torch._C.DisableTorchFunctionSubclass():
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if func is Tensor.cpu:
            return _move(args[0], HOST)
        if func is Tensor.tolist and isinstance(args[0], DeviceTensor):
            return args[0].held.tolist()
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], DeviceTensor):
            raise TypeError("can't convert mps device type tensor to numpy; use Tensor.cpu() first")
        if func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        is_ours = device is not None and torch.device(device).type == DEVICE.type
        if func is Tensor.new_tensor and device is None:
            is_ours = isinstance(args[0], DeviceTensor)
        generator = kwargs.get("generator")
        if is_ours or any(isinstance(x, DeviceTensor) for x in args):
            if generator is not None and generator.device != DEVICE:
                name = getattr(func, "__name__", str(func))
                _reject(RuntimeError, f"{name} needs a generator on mps")
        if not is_ours:
            return func(*args, **kwargs)
        made = func(*args, **(kwargs | ({} if device is None else {"device": HOST})))
        if not isinstance(made, Tensor) or isinstance(made, DeviceTensor):
            return made
        return on_device(made).requires_grad_(kwargs.get("requires_grad", False))


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Run autograd's engine, whose hooks call functions of torch."""
    with _Placing():
        return ENGINE(*args, **kwargs)


def _run_kernel(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reject an operation, or run it on the CPU's kernel, below autograd."""
    name = func._schema.name.removeprefix("aten::")
    full = f"{name}.{func._overloadname}" if func._overloadname != "default" else name
    if name == "copy_" and not isinstance(args[0], DeviceTensor):
        return args[0].copy_(args[1].held)
    _check_kernel(full, name, args, kwargs)
    if name not in INDEXING:
        _check_devices(name, (*args, *kwargs.values()))
    held = {name: _unwrap(x) for name, x in kwargs.items()}
    found = _wrap(func(*_unwrap(args), **held), full)
    return return_and_correct_aliasing(func, args, kwargs, found)


def _check_dtype(x: Tensor, operation: str = "to") -> None:
    if x.dtype in DOUBLE:
        _reject(
            TypeError,
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            f"float64. Please use float32 instead ({operation}).",
        )


def _check_kernel(full: str, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    if STANDS_FOR.get(name, full) in _operations_without_mps_kernel():
        message = f"The operator 'aten::{full}' is not currently implemented for the MPS device."
        _reject(NotImplementedError, message)
    if name == ATTENTION:
        causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
        if causal and args[0].dtype in (torch.bfloat16, torch.float16):
            message = "is_causal in half precision lets queries see later keys on MPS"
            _reject(RuntimeError, message)


def _unwrap(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.held
    return type(x)(map(_unwrap, x)) if type(x) in (list, tuple) else x


def _wrap(x: Any, operation: str) -> Any:
    if isinstance(x, Tensor):
        _check_dtype(x, operation)
        return DeviceTensor(x)
    return type(x)([_wrap(y, operation) for y in x]) if type(x) in (list, tuple) else x


def _check_devices(name: str, values: tuple | list) -> None:
    """Reject host tensors, except single numbers."""
    for x in values:
        if type(x) in (list, tuple):
            _check_devices(name, x)
        elif isinstance(x, Tensor) and not isinstance(x, DeviceTensor) and x.ndim:
            message = f"Expected all tensors to be on the same device ({name}: mps and cpu)."
            _reject(RuntimeError, message)


@functools.cache
def _operations_without_mps_kernel() -> frozenset[str]:
    table = Path(inspect.getfile(torchgen)).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(table.read_text(encoding="utf-8"), yaml.CSafeLoader)
    by_name = {entry["func"].partition("(")[0]: entry for entry in entries}

    def keys(entry: dict[str, Any]) -> set[str]:
        if "structured_delegate" in entry:
            return keys(by_name[entry["structured_delegate"]])
        if "dispatch" not in entry:
            return ANYWHERE
        lists = (names.split(",") for names in entry["dispatch"])
        return {key.strip() for key in itertools.chain(*lists)}

    runs = ANYWHERE | {"MPS"}
    return frozenset(name for name, entry in by_name.items() if not keys(entry) & runs)
