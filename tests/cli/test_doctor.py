"""The doctor on this machine, and on devices that reject or compute something wrong."""

import pytest
import torch

import tests.refusing_device
from rlhf_lab import doctor
from rlhf_lab.models import hooked_transformer
from rlhf_lab.sampling import _Step
from tests.refusing_device import DeviceTensor, RefusingDevice

pytestmark = pytest.mark.usefixtures("no_type_checks")
RUN_KERNEL = tests.refusing_device._run_kernel
TAKE = _Step.take
SAMPLES, OBJECTIVE = "log-probs and values of its samples", "objective and gradient"


def test_doctor_reports_this_machine(warm_python):
    done = warm_python.run(["-m", "rlhf_lab", "doctor"])
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout
    for part in ("python", "torch", "transformer_lens", "wandb", "device"):
        assert part in done.stdout


def findings() -> list[doctor.Finding]:
    with RefusingDevice():
        return list(doctor.compare_devices())


def wrong() -> list[str]:
    return [text.partition(" differ")[0] for _, text, ok in findings() if ok is False]


@pytest.mark.slow
def test_a_device_like_the_cpu_is_right_and_nan_is_wrong(monkeypatch):
    results = findings()
    assert [ok for _, _, ok in results] == [True] * 2 + [None]
    assert "precision='bf16' on device='mps'" in results[-1][1]
    monkeypatch.setattr(doctor, "training_gaps", lambda device: [("values", float("nan"), 1.0)])
    assert wrong() == ["values"]


def wrong_product(func, args, kwargs):
    result = RUN_KERNEL(func, args, kwargs)
    return result * 1.01 if func is torch.ops.aten.addmm.default else result


@pytest.mark.slow
def test_doctor_detects_a_faulty_device(monkeypatch):
    monkeypatch.setattr(tests.refusing_device, "_run_kernel", wrong_product)
    first, objective = wrong()
    assert first.startswith(SAMPLES) and objective == OBJECTIVE


@pytest.mark.slow
def test_doctor_detects_a_token_outside_the_nucleus(monkeypatch):
    """torch 2.13 samples such tokens on MPS, where exponential noise can be -0.0."""

    def take(state, spec, noise):
        step = TAKE(state, spec, noise)
        if not isinstance(step.token, DeviceTensor):
            return step
        first = torch.arange(len(step.token)).to("mps") == 0
        return step._replace(token=torch.where(first, step.candidates[:, -1], step.token))

    monkeypatch.setattr(_Step, "take", take)
    assert SAMPLES in wrong()


def test_doctor_detects_attention_to_the_next_token(monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention

    def leak(q, k, v, **options):
        if q.dtype != torch.float32:
            mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)
            options |= {"attn_mask": mask, "is_causal": False}
        return attend(q, k, v, **options)

    ((_, gap, tolerance),) = doctor.bf16_gaps("cpu")
    assert gap <= tolerance
    monkeypatch.setattr(hooked_transformer.F, "scaled_dot_product_attention", leak)
    assert not doctor.bf16_gaps("cpu")[0][1] <= tolerance
