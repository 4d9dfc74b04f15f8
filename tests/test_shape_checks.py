"""`check_shapes()` and RLHF_LAB_CHECK_SHAPES=1 check shapes for users, or say why they cannot."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

CALL = """
import torch
from rlhf_lab.functional import entropy_per_token
try:
    entropy_per_token(torch.zeros(2, 3))
except Exception as error:
    print(type(error).__name__, error)
    print("cause:", error.__cause__)
else:
    print("silent")
"""


def run(source, surroundings, **more):
    """What a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        env=surroundings | more,
        timeout=300,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("first", "more"),
    [
        ("import rlhf_lab; rlhf_lab.check_shapes(); rlhf_lab.check_shapes()", {}),
        ("from rlhf_lab import RLHFArgs", {"RLHF_LAB_CHECK_SHAPES": "1"}),
    ],
)
def test_a_wrong_shape_is_named_with_function_and_argument(surroundings, first, more):
    said = run(first + CALL, surroundings, **more)
    assert said.startswith("TypeCheckError Type-check error whilst checking the parameters of ")
    assert "rlhf_lab.functional.entropy.entropy_per_token" in said
    assert "'logits'" in said and "f32[2,3]" in said and "batch gen d_vocab" in said
    assert "cause: None" in said


def test_without_it_nothing_is_checked(surroundings):
    assert run(CALL, surroundings, RLHF_LAB_CHECK_SHAPES="0").strip() == "silent"


def test_too_late_is_said_in_a_sentence(surroundings):
    late = "import rlhf_lab.functional, rlhf_lab\nrlhf_lab.check_shapes()"
    said = run(late, surroundings).strip().splitlines()[-1]
    assert said.startswith("rlhf_lab.errors.ConfigError: check_shapes() comes too late for ")
    assert said.endswith("call it before any other import from rlhf_lab.")
