"""`check_shapes()` and RLHF_LAB_CHECK_SHAPES=1: checks of shapes and types for users."""

import pytest

CHECKED = "import rlhf_lab; rlhf_lab.check_shapes()"
CALLS = """
import torch
from rlhf_lab.functional import compute_gae, entropy_per_token
zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
for call in (
    lambda: compute_gae(zeros, ones, 1, 1),  # an int is a float
    lambda: compute_gae(zeros, ones, "1", 1),
    lambda: entropy_per_token(torch.zeros(2, 3)),
):
    try:
        print(call().tolist())
    except Exception as error:
        print(type(error).__name__, error.__cause__, " ".join(str(error).split()))
"""
OWN_POLICY = """
import tempfile
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
print("policy:", type(trainer.policy).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "more", "last"),
    [
        (CHECKED + CALLS + OWN_POLICY + CHECKED, {}, ["policy: Mine"]),
        ("from rlhf_lab import RLHFArgs" + CALLS, {"RLHF_LAB_CHECK_SHAPES": "1"}, []),
    ],
    ids=["call", "variable"],
)  # fmt: skip
def test_wrong_shape_is_named_with_function_and_argument(cold_python, source, more, last):
    valid, text, shape, *rest = cold_python(["-c", source], more).stdout.splitlines()
    assert valid == "[[2.0, 1.0]]" and rest[-1:] == last
    for line in (text, shape):
        assert line.startswith("TypeCheckError None Type-check error whilst checking the parameter")
    assert "rlhf_lab.functional.logprobs.entropy_per_token" in shape
    assert "'logprobs'" in shape and "f32[2,3]" in shape and "batch gen d_vocab" in shape


@pytest.mark.slow
@pytest.mark.nightly
def test_late_call_raises_and_without_calls_nothing_is_checked(cold_python):
    late = CALLS + "import rlhf_lab\nrlhf_lab.check_shapes()"
    done = cold_python(["-c", late], {"RLHF_LAB_CHECK_SHAPES": "0"})
    *_, error = done.stderr.splitlines()
    assert done.stdout.startswith("[[2.0, 1.0]]") and "TypeCheckError" not in done.stdout
    assert error.startswith("rlhf_lab.errors.ConfigError: check_shapes() comes too late for ")
    assert error.endswith("call it before any other import from rlhf_lab.")
