"""A device that refuses what MPS refuses, on any machine: it stands in for a Mac in the tests.

Its tensors are a wrapper subclass: torch's CPU kernels do the work on what is wrapped, so that
every number is the CPU's, while `x.device` says "mps" and every operation passes `_run_kernel`.
While a `RefusingDevice` is entered, `device="mps"` makes such tensors.

It refuses
- float64, wherever a tensor on the device would have it;
- operations for which the installed torch has no MPS kernel, by its own native_functions.yaml;
- tensors of two devices in one operation, and a generator of another device;
- causal attention in half precision, where queries can see later keys (pytorch issue 195910);
- within `phase()`, to be read by the host, but for the places that are given.

It cannot show what an MPS kernel rounds otherwise or does wrong, nor limits of a kernel to some
types: a kernel in torch's table counts as one that works.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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
STANDS_FOR = {
    "_fused_sdp_choice": "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_attention_math_for_mps"
    ),
}
"""What torch runs on a CPU where it runs something else on MPS."""
READS = (
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave.Tensor",
)
ENGINE = torch.autograd._engine_run_backward
PACKAGE = str(Path(__file__).parent.parent / "rlhf_lab")


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `held` is the CPU tensor that has its numbers."""

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

    @property
    def device(self) -> torch.device:
        return DEVICE

    is_cpu = property(lambda self: False)
    is_mps = property(lambda self: True)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run_kernel(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"DeviceTensor({self.held})"


class _AnyGenerator(type(torch.Generator)):
    """What is imported while the device is there may keep its generator as a type to check by."""

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, torch._C.Generator)


class DeviceGenerator(torch.Generator, metaclass=_AnyGenerator):
    """Takes the place of torch.Generator; on the device it draws what the CPU's would."""

    def __new__(cls, device: str | torch.device = HOST) -> torch.Generator:
        if torch.device(device).type != DEVICE.type:
            return torch._C.Generator(device)
        return super().__new__(cls, HOST)

    @property
    def device(self) -> torch.device:
        return DEVICE


class RefusingDevice:
    """The device, there while it is entered.

    Args:
        refuses: False only notes in `refused` what it would refuse.
        may_read: where the host may read within `phase()`, each as "file.py:function".

    Attributes:
        refused: how often it was asked for what it does not do, by reason and place.
        reads: how often the host read within `phase()`, by operation and place.
    """

    entered: "RefusingDevice | None" = None

    def __init__(self, refuses: bool = True, may_read: tuple[str, ...] | None = None) -> None:
        self.refuses, self.may_read = refuses, may_read
        self.refused: Counter[tuple[str, str]] = Counter()
        self.reads: Counter[tuple[str, str]] = Counter()
        self._in_phase, self._stack = False, contextlib.ExitStack()

    def __enter__(self) -> "RefusingDevice":
        enter = self._stack.enter_context
        enter(mock.patch.object(RefusingDevice, "entered", self))
        enter(mock.patch.object(torch, "Generator", DeviceGenerator))
        enter(mock.patch.object(torch.backends.mps, "is_available", lambda: True))
        enter(mock.patch.object(torch.backends.mps, "is_macos_or_newer", lambda *version: True))
        enter(mock.patch.object(torch.mps, "driver_allocated_memory", lambda: 0))
        enter(mock.patch.object(torch.autograd, "_engine_run_backward", _run_backward))
        enter(_parameters_swap())
        enter(_Placing())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def phase(self) -> Iterator[None]:
        """Within, the host may read only where it is allowed to."""
        self._in_phase = True
        try:
            yield
        finally:
            self._in_phase = False

    def refuse(self, error: type[Exception], reason: str, sentence: str) -> None:
        """Raise, or only note it."""
        self.refused[reason, _place()] += 1
        if self.refuses:
            raise error(sentence)

    def note_read(self, operation: str) -> None:
        """Count what the host reads, and refuse it in a phase."""
        if not self._in_phase:
            return
        place = _place()
        self.reads[operation, place] += 1
        if self.may_read is not None and place.rpartition(":")[0] not in self.may_read:
            self.refuse(
                RuntimeError,
                f"host read: {operation}",
                f"{operation} makes the host wait ({place})",
            )


class _Placing(TorchFunctionMode):
    """Sees every function of torch, those without tensors included."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


@contextlib.contextmanager
def _parameters_swap() -> Iterator[None]:
    """`module.to` puts what it made in the place of a parameter that stays the same object."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def on_device(x: Tensor) -> DeviceTensor:
    """A host tensor, copied to the device."""
    _check_dtype(x)
    return DeviceTensor(x.detach().clone())


def _refuse(error: type[Exception], reason: str, sentence: str) -> None:
    if RefusingDevice.entered is not None:
        RefusingDevice.entered.refuse(error, reason, sentence)
    else:
        raise error(sentence)


def _note_read(operation: str) -> None:
    if RefusingDevice.entered is not None:
        RefusingDevice.entered.note_read(operation)


def _place() -> str:
    """The innermost line of the package that is running, as file:function:line.

    A comprehension is part of its function, which it is not for every version of Python.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            function = frame.f_code.co_qualname.partition(".<locals>.<")[0].rpartition(".")[2]
            return f"{path}:{function}:{frame.f_lineno}"
        frame = frame.f_back
    return "tests:tests:0"


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
    """x on this device, with its gradient going back the same way."""
    if x.device.type == device.type:
        return x
    if device.type == DEVICE.type:
        return _ToDevice.apply(x)
    _note_read("cpu")
    return _ToHost.apply(x)


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
    """A function or method of torch, which may read, move, or place its result on the device."""
    with torch._C.DisableTorchFunctionSubclass():
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if func is Tensor.cpu:
            return _move(args[0], HOST)
        if func is Tensor.tolist and isinstance(args[0], DeviceTensor):
            _note_read("tolist")
            return args[0].held.tolist()
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], DeviceTensor):
            raise TypeError("can't convert mps device type tensor to numpy; use Tensor.cpu() first")
        if func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        asked = kwargs.get("device")
        wanted = asked is not None and torch.device(asked).type == DEVICE.type
        if func is Tensor.new_tensor and asked is None:
            wanted = isinstance(args[0], DeviceTensor)
        generator = kwargs.get("generator")
        if wanted or any(isinstance(x, DeviceTensor) for x in args):
            if generator is not None and generator.device != DEVICE:
                name = getattr(func, "__name__", str(func))
                _refuse(RuntimeError, f"generator: {name}", f"{name} needs a generator on mps")
        if not wanted:
            return func(*args, **kwargs)
        made = func(*args, **(kwargs | ({} if asked is None else {"device": HOST})))
        return _place_result(made, kwargs.get("requires_grad", False))


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Autograd's engine; hooks call functions of torch meanwhile, which are to be seen, too."""
    with _Placing():
        return ENGINE(*args, **kwargs)


def _place_result(made: Any, requires_grad: bool) -> Any:
    if not isinstance(made, Tensor) or isinstance(made, DeviceTensor):
        return made
    return on_device(made).requires_grad_(requires_grad)


def _run_kernel(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Refuse an operation or run it: what is below autograd, on the CPU's kernel."""
    name = func._schema.name.removeprefix("aten::")
    full = f"{name}.{func._overloadname}" if func._overloadname != "default" else name
    if name == "copy_" and not isinstance(args[0], DeviceTensor):
        _note_read("copy_")
        return args[0].copy_(args[1].held)
    _check_kernel(full, name, args, kwargs)
    _check_devices(name, (*args, *kwargs.values()))
    if full in READS or name in READS:
        _note_read(name)
    elif name in ("index", "index_put", "index_put_"):
        if any(x is not None and x.dtype == torch.bool for x in args[1]):
            _note_read("index by a mask")
    held = {name: _unwrap(x) for name, x in kwargs.items()}
    found = _wrap(func(*_unwrap(args), **held), full)
    return return_and_correct_aliasing(func, args, kwargs, found)


def _check_dtype(x: Tensor, operation: str = "to") -> None:
    if x.dtype in DOUBLE:
        _refuse(
            TypeError,
            f"float64: {operation}",
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            f"float64. Please use float32 instead ({operation}).",
        )


def _check_kernel(full: str, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    known = STANDS_FOR.get(name, full)
    if known in _without_mps_kernel():
        _refuse(
            NotImplementedError,
            f"no kernel: {full}",
            f"The operator 'aten::{full}' is not currently implemented for the MPS device.",
        )
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
        if causal and args[0].dtype in (torch.bfloat16, torch.float16):
            _refuse(
                RuntimeError,
                "causal attention in half precision",
                "is_causal in half precision lets queries see later keys on MPS "
                "(pytorch issue 195910).",
            )


def _unwrap(x: Any) -> Any:
    """What is held by device tensors, in lists and tuples, too."""
    if isinstance(x, DeviceTensor):
        return x.held
    return type(x)(map(_unwrap, x)) if type(x) in (list, tuple) else x


def _wrap(x: Any, operation: str) -> Any:
    """The results of an operation as device tensors."""
    if isinstance(x, Tensor):
        _check_dtype(x, operation)
        return DeviceTensor(x)
    return type(x)([_wrap(y, operation) for y in x]) if type(x) in (list, tuple) else x


def _check_devices(name: str, values: tuple | list) -> None:
    """Host tensors may stand beside device tensors as single numbers, as sources and as indices."""
    if name in ("copy_", "index", "index_put", "index_put_"):
        return
    for x in values:
        if type(x) in (list, tuple):
            _check_devices(name, x)
        elif isinstance(x, Tensor) and not isinstance(x, DeviceTensor) and x.ndim:
            _refuse(
                RuntimeError,
                f"two devices: {name}",
                f"Expected all tensors to be on the same device, but found mps and cpu in {name}.",
            )


@functools.cache
def _without_mps_kernel() -> frozenset[str]:
    """The operations that the installed torch cannot run on MPS, by its table of kernels."""
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
