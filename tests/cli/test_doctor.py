"""The doctor on a device that refuses, and on devices that compute something wrong."""

import pytest
import torch
from torch import Tensor

import tests.refusing_device
from rlhf_lab import device_gaps, doctor
from rlhf_lab.diffing import weights
from rlhf_lab.models import hooked_transformer
from rlhf_lab.sampling import _Step
from tests.refusing_device import DeviceTensor, RefusingDevice

pytestmark = pytest.mark.usefixtures("no_type_checks")
TRUE_KERNEL = tests.refusing_device._run_kernel
TRUE_TAKE = _Step.take


def findings() -> list[doctor.Finding]:
    with RefusingDevice():
        return list(doctor._devices())


def wrong() -> list[str]:
    """What the doctor finds wrong with the device."""
    found = findings()
    assert [subject for subject, _, _ in found] == ["mps"] * 5
    return [said.partition(" differ")[0] for _, said, ok in found if ok is False]


@pytest.mark.slow
def test_a_device_that_computes_as_the_cpu_is_well():
    found = findings()
    assert [ok for _, _, ok in found] == [True] * 4 + [None]
    assert "precision='bf16' on device='mps'" in found[-1][1]


@pytest.mark.slow
def test_a_wrong_product_is_found_in_every_forward(monkeypatch):
    def run(func, args, kwargs):
        found = TRUE_KERNEL(func, args, kwargs)
        return found * 1.01 if func is torch.ops.aten.addmm.default else found

    monkeypatch.setattr(tests.refusing_device, "_run_kernel", run)
    assert wrong()[1:] == ["log-probs and values of its samples", "objective and gradient"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_found(monkeypatch, number):
    """Also beside log-probs and gradients that are right."""

    def run(func, args, kwargs):
        found = TRUE_KERNEL(func, args, kwargs)
        relu = func is torch.ops.aten.relu.default
        return TRUE_KERNEL(torch.ops.aten.mul.Tensor, (found, number), {}) if relu else found

    monkeypatch.setattr(tests.refusing_device, "_run_kernel", run)
    assert wrong()[:2] == ["logits and values", "log-probs and values of its samples"]


@pytest.mark.slow
def test_a_token_outside_the_nucleus_is_found(monkeypatch):
    """As torch 2.13 draws on MPS, where exponential noise can be -0.0."""

    def take(state, spec, noise):
        step = TRUE_TAKE(state, spec, noise)
        if not isinstance(step.token, DeviceTensor):
            return step
        first = torch.arange(len(step.token)).to("mps") == 0
        return step._replace(token=torch.where(first, step.candidates[:, -1], step.token))

    monkeypatch.setattr(_Step, "take", take)
    assert "log-probs and values of its samples" in wrong()


@pytest.mark.slow
def test_a_missing_type_or_kernel_is_found(monkeypatch):
    monkeypatch.setattr(weights, "exact", Tensor.double)
    (sentence,) = wrong()
    assert sentence.startswith("probes_gap failed: Cannot convert a MPS Tensor to float64")
    monkeypatch.setattr(weights, "exact", lambda x: x)  # to the kernel that is not there
    (sentence,) = wrong()
    assert "'aten::_linalg_eigh' is not currently implemented" in sentence


def test_attention_in_half_precision_that_sees_later_tokens_is_found(monkeypatch):
    """One token ahead is enough."""
    assert device_gaps.bf16_gap("cpu").ok
    attend = torch.nn.functional.scaled_dot_product_attention

    def leak(q, k, v, **options):
        if q.dtype != torch.float32:
            seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)
            options |= {"attn_mask": seen, "is_causal": False}
        return attend(q, k, v, **options)

    monkeypatch.setattr(hooked_transformer.F, "scaled_dot_product_attention", leak)
    assert not device_gaps.bf16_gap("cpu").ok


def test_a_gap_that_is_no_number_is_wrong():
    assert not device_gaps.Compared("x", float("nan"), 1.0).ok
    assert not device_gaps.Compared("x", float("inf"), 1.0).ok
    assert device_gaps.Compared("x", 1.0, 1.0).ok
