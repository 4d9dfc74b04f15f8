"""The checker of annotations that the tests run with refuses what beartype does, each time."""

from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from rlhf_lab import shape_checks
from rlhf_lab.shape_checks import check_once
from tests.type_checker import CHECKERS, beartype_once


def define(result):
    """A function within a function, defined anew at each call; it returns what is given here."""

    @jaxtyped(typechecker=beartype_once)
    def same_length(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return result

    return same_length


def test_a_function_that_is_defined_again_is_checked_again_and_compiled_once():
    known = len(CHECKERS)
    for _ in range(3):
        assert define(torch.ones(3))(torch.zeros(3)).sum() == 3
        with pytest.raises(TypeCheckError, match="return value"):
            define(torch.ones(3))(torch.zeros(2))
        with pytest.raises(TypeCheckError, match="parameters"):
            define(torch.ones(3))(torch.zeros(3, dtype=torch.long))
    assert len(CHECKERS) == known + 2


def test_the_users_checker_compiles_at_the_first_call_and_checks_each_thing_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(shape_checks, "_beartype", lambda fn: compiled.append(fn) or beartype(fn))

    @jaxtyped(typechecker=check_once)
    def first(x: Float[Tensor, " n"], given: Tensor) -> Float[Tensor, " n"]:
        return given

    assert not compiled
    for _ in range(2):
        assert first(torch.zeros(3), torch.ones(3)).sum() == 3
        with pytest.raises(TypeCheckError, match="return value"):
            first(torch.zeros(2), torch.ones(3))
    arguments, returned = (fn.__annotations__ for fn in compiled)
    assert [arguments["x"] is Any, arguments["return"] is Any] == [False, True]
    assert [returned["x"] is Any, returned["return"] is Any] == [True, False]
    with pytest.raises(TypeCheckError, match=r"parameter 'x'"):
        first(torch.zeros(3, dtype=torch.long), torch.ones(3))
