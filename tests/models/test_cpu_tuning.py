"""Tests of CPU tuning: the route on each processor, its exactness, and memory."""

import pytest
import torch

from rlhf_lab.models import cpu_tuning


@pytest.fixture(autouse=True)
def restored_route():
    before = cpu_tuning.current_route()
    yield
    cpu_tuning.set_route(before)


def test_chosen_route_is_exact():
    tuning = cpu_tuning.tune_cpu(768)
    assert tuning.route == cpu_tuning.current_route() and tuning.error <= 1e-6
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(257, 257, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize(
    ("vendor", "d_model", "error", "route"),
    [
        ("AuthenticAMD", 768, 4e-7, "oneDNN"),
        ("AuthenticAMD", 768, 2e-3, "BLAS"),  # bfloat16 matrix units
        ("AuthenticAMD", 128, 4e-7, "BLAS"),
        ("GenuineIntel", 768, 4e-7, "BLAS"),
        ("", 768, 4e-7, "BLAS"),
    ],
)
def test_only_exact_onednn_on_wide_amd_replaces_blas(vendor, d_model, error, route, monkeypatch):
    errors = {"oneDNN": error, "BLAS": 2e-7}
    monkeypatch.setattr(cpu_tuning, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(cpu_tuning, "matmul_error", lambda: errors[cpu_tuning.current_route()])
    assert cpu_tuning.tune_cpu(d_model)[1:] == (route, errors[route])
    assert cpu_tuning.current_route() == route


def test_matmul_error_is_that_of_the_current_product(monkeypatch):
    product = torch.Tensor.__matmul__
    scaled = lambda a, b: product(a, b) * (1.001 if a.dtype == torch.float32 else 1.0)
    monkeypatch.setattr(torch.Tensor, "__matmul__", scaled)
    assert cpu_tuning.matmul_error(64) == pytest.approx(1e-3, rel=1e-2)


def test_nothing_is_set_without_glibc_or_a_policy_on_cpu(policy, monkeypatch):
    monkeypatch.setattr(cpu_tuning.platform, "libc_ver", lambda: ("", ""))
    assert cpu_tuning.keep_freed_memory() is False
    assert cpu_tuning.tune_for(policy.to("meta"), True) is None
