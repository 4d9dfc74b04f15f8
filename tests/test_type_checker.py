"""The checker of annotations that the tests run with refuses what beartype does, each time."""

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

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
