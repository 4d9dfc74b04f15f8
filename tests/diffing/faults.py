"""Injected faults: one line of a function is changed, and a test must fail."""

import inspect
from collections.abc import Callable

import pytest

from tests.probes import planting


def assert_fault_fails(
    request: pytest.FixtureRequest, test: Callable[..., None], where: str, old: str, new: str
) -> None:
    """Run a test with its fixtures while `old` is replaced by `new` in `diffing.{where}`."""
    names = inspect.signature(test).parameters
    values = {name: request.getfixturevalue(name) for name in names}
    planting.assert_fault_fails(f"diffing.{where}", old, new, lambda: test(**values))
