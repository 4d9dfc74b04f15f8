"""Planted faults: a changed line of a function, and a run with it."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

import pytest

OTHER_ROOMS = ("diffing.", "functional.", "models.", "organism.")


class Fault(NamedTuple):
    """One changed line of a probe.

    Args:
        name: what is wrong.
        probe: the kind whose record is wrong.
        where: the function, as module:qualified.name below rlhf_lab.probes, or below rlhf_lab where
            the module begins with the name of another room.
        old, new: the text that is replaced, once.
        run: which of the runs of the test shows it.
    """

    name: str
    probe: str
    where: str
    old: str
    new: str
    run: str = "plain"


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Run with the function changed: its code is exchanged, so that all who call it are served."""
    module_name, _, path = fault.where.partition(":")
    room = "rlhf_lab" if module_name.startswith(OTHER_ROOMS) else "rlhf_lab.probes"
    module = import_module(f"{room}.{module_name}")
    found = module
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.old) >= 1, f"{fault.name}: {fault.where} has no {fault.old!r}"
    changed = source[source.index("def ") :].replace(fault.old, fault.new, 1)
    names: dict[str, object] = {}
    exec(compile(changed, fault.name, "exec"), vars(module), names)
    whole = function.__code__
    function.__code__ = names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = whole


def assert_fault_fails(where: str, old: str, new: str, test: Callable[[], object]) -> None:
    """Check that an assertion of a test fails while `old` is replaced by `new` in `where`."""
    with planted(Fault(old, "", where, old, new)), pytest.raises(AssertionError):
        test()
