"""Tests of devices, the precision of products, and CPU tuning."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import cpu_tuning, run_policy
from rlhf_lab.models import device as devices
from rlhf_lab.models.decode import Decoder
from rlhf_lab.models.device import pick_device, validate_tf32
from tests.models.test_paths import PREFIX, TOKENS, random_policy
from tests.refusing_device import RefusingDevice

MATMUL = torch.backends.mkldnn.matmul
SMALL = {"preset": "reel", "total_phases": 3, "warmup_steps": 1, "batch_size": 16, "gen_len": 12}


def products():
    return torch.backends.cuda.matmul.fp32_precision


def set_devices(monkeypatch, n_cuda, mps):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_auto_picks_the_fastest_device(monkeypatch):
    monkeypatch.setattr(devices, "MPS_TORCH", "0")
    for n_cuda, mps, expected in ((2, True, "cuda"), (0, True, "mps"), (0, False, "cpu")):
        set_devices(monkeypatch, n_cuda, mps)
        assert pick_device("auto") == torch.device(expected)


@pytest.mark.parametrize("name", ["abacus", "cuda:1", "mps", "cpu:1", "cpu:", "cuda:x", "meta"])
def test_unavailable_device_raises(monkeypatch, name):
    set_devices(monkeypatch, 1, False)
    assert pick_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=f"device='{name}'"):
        pick_device(name)


@pytest.mark.parametrize("name", ["mps", "auto"])
def test_mps_raises_with_old_torch(name, monkeypatch):
    set_devices(monkeypatch, 0, True)
    for version in ("2.13.0", "2.13.0+cpu", "2.20"):
        monkeypatch.setattr(torch, "__version__", version)
        assert pick_device(name).type == "mps"
    for version in ("2.9.0", "2.12.1"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(ConfigError, match=f"needs torch 2.13 or newer.*this is {version}"):
            pick_device(name)
    assert pick_device("cpu").type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_phase_sets_the_precision_of_products(tmp_path, monkeypatch, precision):
    """In sampling, scoring and learning, also when they are called separately."""
    seen, before = {}, products()
    during = {"tf32" if precision == "tf32" else before}
    monkeypatch.setattr("rlhf_lab.training.components.validate_tf32", lambda *settings: None)
    trainer = RLHFTrainer(RLHFArgs(**SMALL, precision=precision), out=tmp_path / "run")
    for event in ("after_rollout", "after_score", "after_loss", "after_backward", "after_phase"):
        trainer.on(event)(lambda ctx, event=event: seen.update({event: products()}))
    trainer.run_phase()
    assert set(seen.values()) == during and len(seen) == 5 and products() == before
    seen.clear()
    trainer.learning_phase(trainer.rollout_phase())
    assert set(seen.values()) == during and len(seen) == 4 and products() == before


def test_tf32_raises_before_ampere(monkeypatch, tmp_path):
    generation = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation.major, 5))
    for name, capability in (("cpu", 0), ("mps", 0), ("cuda", 7), ("cuda", 8)):
        generation.major = capability
        for precision in ("fp32", "bf16", *["tf32"] * (capability == 8)):
            validate_tf32(torch.device(name), precision)
        if capability < 8:
            with pytest.raises(ConfigError, match=f"='tf32' on device='{name}'.*Ampere.*'fp32'"):
                validate_tf32(torch.device(name), "tf32")
    with pytest.raises(ConfigError, match="precision='tf32'"):
        RLHFTrainer(RLHFArgs(**SMALL | {"device": "cpu"}, precision="tf32"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(autouse=True)
def restored_route():
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


ROUTES = [("AuthenticAMD", 768, 4e-7, "oneDNN"), ("AuthenticAMD", 128, 4e-7, "BLAS")]
ROUTES += [("AuthenticAMD", 768, 2e-3, "BLAS")]  # bfloat16 matrix units
ROUTES += [("GenuineIntel", 768, 4e-7, "BLAS"), ("", 768, 4e-7, "BLAS")]


@pytest.mark.parametrize(("vendor", "d_model", "error", "route"), ROUTES)
def test_only_exact_onednn_on_wide_amd_replaces_blas(vendor, d_model, error, route, monkeypatch):
    errors = {cpu_tuning.ROUTES["oneDNN"]: error, cpu_tuning.ROUTES["BLAS"]: 2e-7}
    monkeypatch.setattr(cpu_tuning, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(cpu_tuning, "matmul_error", lambda: errors[MATMUL.fp32_precision])
    cpu_tuning.tune_cpu(d_model)
    assert cpu_tuning.ROUTES[route] == MATMUL.fp32_precision
    monkeypatch.undo()
    cpu_tuning.tune_cpu(768)
    assert cpu_tuning.matmul_error(257) <= 1e-6  # on this processor


def test_tuning_is_for_enabled_runs_on_the_cpu_and_for_glibc(policy, monkeypatch):
    tuned = []
    monkeypatch.setattr(cpu_tuning.ctypes, "CDLL", None)  # not called
    monkeypatch.setattr(cpu_tuning.platform, "libc_ver", lambda: ("", ""))
    cpu_tuning.keep_freed_memory()
    monkeypatch.setattr(cpu_tuning, "tune_cpu", tuned.append)
    for enabled, place in ((False, "cpu"), (True, "cpu"), (True, "meta")):
        cpu_tuning.tune_for(policy.to(place), enabled)
    assert tuned == [16]


def run_all_paths(policy):
    """Outputs on two prompts of unequal lengths, whose ids and masks are on the CPU."""
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[1, 0] = False
    with torch.no_grad():
        return [
            *policy(TOKENS),
            *policy(TOKENS, mask),
            policy.base_model(TOKENS, attention_mask=mask),
            run_policy(policy, TOKENS, PREFIX, attention_mask=mask).logprobs,
            Decoder(policy, TOKENS, mask, 3).state.logits,
        ]


@pytest.mark.slow
def test_ids_and_masks_on_the_cpu_are_moved_to_the_policy():
    policy = random_policy().cpu()
    expected = run_all_paths(policy)
    with RefusingDevice():
        moved = run_all_paths(policy.to("mps"))
        assert all(x.device.type == "mps" for x in moved)
        for x, y in zip(moved, expected, strict=True):
            torch.testing.assert_close(x.cpu(), y, atol=1e-5, rtol=1e-5)
