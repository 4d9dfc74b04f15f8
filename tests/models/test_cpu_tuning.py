"""Tests the CPU settings: the choice on each processor, its exactness, and that it is undone."""

import pytest
import torch

from rlhf_lab.models import cpu_tuning


@pytest.fixture(autouse=True)
def settings_are_put_back():
    before = cpu_tuning.current_route()
    yield
    cpu_tuning.set_route(before)


def test_the_route_that_is_chosen_here_is_exact():
    tuning = cpu_tuning.tune_cpu(768)
    assert tuning.route == cpu_tuning.current_route()
    assert tuning.error <= 1e-6
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(257, 257, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).norm() <= 1e-6 * exact.norm()


def test_amd_processors_take_onednn(monkeypatch):
    monkeypatch.setattr(cpu_tuning, "processor_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(cpu_tuning, "matmul_error", lambda: 4e-7)
    assert cpu_tuning.tune_cpu(768)[1:] == ("oneDNN", 4e-7)
    assert cpu_tuning.current_route() == "oneDNN"


def test_a_route_that_is_not_exact_is_refused(monkeypatch):
    """As on a processor with bfloat16 matrix units, whose products are off by 2^-8."""
    error = {"oneDNN": 2e-3, "BLAS": 2e-7}
    monkeypatch.setattr(cpu_tuning, "processor_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(cpu_tuning, "matmul_error", lambda: error[cpu_tuning.current_route()])
    assert cpu_tuning.tune_cpu(768)[1:] == ("BLAS", 2e-7)
    assert cpu_tuning.current_route() == "BLAS"


def test_narrow_models_keep_the_default(monkeypatch):
    monkeypatch.setattr(cpu_tuning, "processor_vendor", lambda: "AuthenticAMD")
    assert cpu_tuning.tune_cpu(128).route == cpu_tuning.current_route() == "BLAS"


@pytest.mark.parametrize("vendor", ["GenuineIntel", ""])
def test_other_processors_keep_the_default(monkeypatch, vendor):
    monkeypatch.setattr(cpu_tuning, "processor_vendor", lambda: vendor)
    assert cpu_tuning.tune_cpu(768).route == cpu_tuning.current_route() == "BLAS"


def test_the_error_is_that_of_the_product_in_use(monkeypatch):
    """A matrix product that is off by one part in a thousand everywhere."""
    exact = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda a, b: exact(a, b) * (1.001 if a.dtype == torch.float32 else 1.0),
    )
    assert cpu_tuning.matmul_error(64) == pytest.approx(1e-3, rel=1e-2)


def test_memory_is_left_alone_without_glibc(monkeypatch):
    monkeypatch.setattr(cpu_tuning.platform, "libc_ver", lambda: ("", ""))
    assert cpu_tuning.keep_freed_memory() is False


def test_comparing_the_routes_leaves_the_one_in_use(monkeypatch):
    """Scripted times: BLAS 3 seconds, oneDNN 2, so oneDNN is 1.5 times as fast."""
    seconds = {"BLAS": 3.0, "oneDNN": 2.0}
    took = lambda run, number: seconds[cpu_tuning.current_route()]
    monkeypatch.setattr(cpu_tuning, "timeit", took)
    for route in cpu_tuning.ROUTES:
        cpu_tuning.set_route(route)
        assert cpu_tuning.route_speedup(8, 3) == 1.5
        assert cpu_tuning.current_route() == route
