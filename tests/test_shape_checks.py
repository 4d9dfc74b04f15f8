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
    assert "rlhf_lab.functional.logprobs.entropy_per_token" in said
    assert "'logprobs'" in said and "f32[2,3]" in said and "batch gen d_vocab" in said
    assert "cause: None" in said


def test_without_it_nothing_is_checked(surroundings):
    assert run(CALL, surroundings, RLHF_LAB_CHECK_SHAPES="0").strip() == "silent"


def test_too_late_is_said_in_a_sentence(surroundings):
    late = "import rlhf_lab.functional, rlhf_lab\nrlhf_lab.check_shapes()"
    said = run(late, surroundings).strip().splitlines()[-1]
    assert said.startswith("rlhf_lab.errors.ConfigError: check_shapes() comes too late for ")
    assert said.endswith("call it before any other import from rlhf_lab.")


OWN_POLICY = """
import tempfile
import torch
from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.models import TransformerWithValueHead, load_model

class Mine(torch.nn.Module):
    base_model = property(lambda self: self.inner.base_model)
    value_head = property(lambda self: self.inner.value_head)
    device = property(lambda self: self.inner.device)

    def __init__(self):
        super().__init__()
        self.inner = TransformerWithValueHead(load_model("reel-nano"))

    def forward(self, *texts, **options):
        return self.inner(*texts, **options)

args = RLHFArgs(preset="reel", total_phases=1, warmup_steps=0, batch_size=8, num_minibatches=2)
trainer = RLHFTrainer(args, policy=Mine(), out=tempfile.mkdtemp() + "/run")
print("taken:", type(trainer.policy).__name__)
"""


def test_a_class_of_the_learners_own_may_stand_in_the_packages_place(surroundings):
    first = "import rlhf_lab; rlhf_lab.check_shapes()"
    assert "taken: Mine" in run(first + OWN_POLICY, surroundings)


def test_a_whole_number_is_taken_where_a_float_is_asked_for(surroundings):
    """As by every checker of Python (PEP 484), a learner's `kl_coef = 0` among them."""
    call = """
import torch
from rlhf_lab.functional import compute_gae
print(compute_gae(torch.zeros(1, 2), torch.ones(1, 2), 1, 1).tolist())
try:
    compute_gae(torch.zeros(1, 2), torch.ones(1, 2), "1", 1)
except Exception as error:
    print(type(error).__name__)
"""
    said = run("import rlhf_lab; rlhf_lab.check_shapes()" + call, surroundings)
    assert said.splitlines() == ["[[2.0, 1.0]]", "TypeCheckError"]
