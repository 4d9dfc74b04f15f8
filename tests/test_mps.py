"""MPS without a Mac: training on a device that rejects what MPS rejects matches the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.torch_version import TorchVersion

from rlhf_lab.__main__ import main
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.device import MPS_TORCH, exact, where_exact
from rlhf_lab.models.export import export_policy
from rlhf_lab.models.hooked_model import final_residuals, model_where_exact
from rlhf_lab.probes import Run, attach, default_suite
from rlhf_lab.probes.direction import fit_direction, project
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.resume import load_policy
from rlhf_lab.training.rollout import Rollout
from tests.refusing_device import RefusingDevice
from tests.training.recorded_runs import read_metrics

pytestmark = [
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.skipif(TorchVersion(torch.__version__) < MPS_TORCH, reason="refused on MPS"),
]

SMALL = dict(preset="reel", total_phases=2, batch_size=8, num_minibatches=2, warmup_steps=1)
SMALL |= dict(gen_len=5)


def train_on_both(directory: Path, probes: bool = False, **fields: Any) -> list[RLHFTrainer]:
    """Train the same run on the CPU and on the device."""
    trainers = []
    for name in ("cpu", "mps"):
        args = RLHFArgs(**(SMALL | fields), device=name)
        with RefusingDevice() as device:
            trainers.append(trainer := RLHFTrainer(args, out=directory / name))
            assert trainer.policy.device.type == name
            if probes:
                attach(trainer, default_suite(trainer))
            rollouts: list[Rollout] = []
            trainer.on("after_score")(lambda ctx, seen=rollouts: seen.append(ctx.rollout))
            trainer.train()
            found = [rollouts[0].true_rewards, *rollouts[0].text_metrics.values()]
            assert {x.device.type for x in found if x is not None} <= {name}
        assert not device.refused
    return trainers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[RLHFTrainer]:
    """A finished run on the CPU and one on the device."""
    return train_on_both(tmp_path_factory.mktemp("trained"))


def assert_same_runs(on_cpu: RLHFTrainer, on_device: RLHFTrainer) -> None:
    """Check that metrics and weights are bitwise identical."""
    assert read_metrics(on_cpu.run.path) == read_metrics(on_device.run.path)
    weights = dict(on_device.policy.named_parameters())
    for name, weight in on_cpu.policy.named_parameters():
        assert torch.equal(weight, weights[name].detach().cpu()), name


def test_run_matches_the_cpu(trained):
    assert_same_runs(*trained)


SETTINGS = {
    "truncated, stopped, adapters": dict(
        top_k=5, top_p=0.9, stop_tokens="movie,film", gen_len=10, lora_rank=2
    ),
    "critic in micro-batches, KL in the reward": dict(
        value_head="separate", activation_checkpointing=True, micro_batch_size=2,
        kl_in="reward", kl_estimator="k1", advantages="gae", target_kl=1.0,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", SETTINGS)
def test_run_with_other_settings_matches_the_cpu(tmp_path, what):
    assert_same_runs(*train_on_both(tmp_path, **SETTINGS[what], total_phases=1, warmup_steps=0))


@pytest.mark.slow
def test_reference_on_the_cpu_matches_one_on_the_device(tmp_path):
    fields = {"reference_device": "cpu", "reset_reference_every": 1, "lora_rank": 2}
    trainers = train_on_both(tmp_path, probes=True, gen_len=26, **fields)
    assert_same_runs(*trainers)
    with RefusingDevice():
        resumed = RLHFTrainer.resume(trainers[1].run.path)
        assert load_policy(trainers[1].run.path, device="mps")[0].device.type == "mps"
    for reference in (trainers[1].reference, resumed.reference):
        places = [weight.device.type for weight in (reference.W_E, reference.W_Q, reference.W_U)]
        assert places == ["cpu", "cpu", "mps"]


@pytest.mark.slow
def test_passed_reference_moves_to_the_policy(tmp_path):
    fields, parts = SMALL | {"device": "mps"}, {"reference": load_model("reel-nano")}
    with RefusingDevice():
        assert RLHFTrainer(RLHFArgs(**fields), out=tmp_path / "run", **parts).run_phase()


def test_reference_on_the_cpu_runs_in_bf16():
    reference, tokens = load_model("reel-nano").requires_grad_(False), torch.arange(6)[None]
    expected = final_residuals(reference, tokens, dtype=torch.bfloat16)
    with RefusingDevice():
        found = final_residuals(reference, tokens.to("mps"), dtype=torch.bfloat16)
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_run_of_a_llama_matches_the_cpu(tmp_path, llama_dir):
    fields = {"base_model": str(llama_dir), "reward_fn": "count:w1", "prefix": "w3 w4"}
    assert_same_runs(*train_on_both(tmp_path, **fields))


@pytest.mark.slow
def test_run_resumes_on_its_device(trained, tmp_path):
    with RefusingDevice():
        RLHFTrainer(RLHFArgs(**SMALL, device="mps"), out=tmp_path / "begun").run_phase()
        resumed = RLHFTrainer.resume(tmp_path / "begun")
        assert resumed.policy.device.type == "mps" and resumed.phase == 1
        resumed.train()
        assert_same_runs(trained[0], resumed)


@pytest.mark.slow
def test_probe_records_match_the_cpu(tmp_path):
    trainers = train_on_both(tmp_path, probes=True, gen_len=26)
    assert_same_runs(*trainers)
    on_cpu, on_device = (Run(trainer.run.path) for trainer in trainers)
    assert on_cpu.probes() == on_device.probes() and len(on_device.probes()) == 8
    assert [check for check in on_device.checks() if not check.ok] == []
    for name in on_cpu.probes():
        assert on_cpu.records(name) == on_device.records(name)
    assert_same_files(on_cpu.store.path, on_device.store.path)


@pytest.mark.slow
def test_export_matches_the_cpu(trained, tmp_path):
    with RefusingDevice():
        for trainer in trained:
            out = tmp_path / "exported" / trainer.device.type
            _, gap = export_policy(trainer.policy, "reel-nano", out)
            assert gap.weighed < 1e-5
    assert_same_files(tmp_path / "exported" / "cpu", tmp_path / "exported" / "mps")


def assert_same_files(expected: Path, found: Path) -> None:
    """Check that two directories have the same tensors and JSON."""
    files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(found) for path in found.rglob("*") if path.is_file())
    assert any(file.suffix == ".safetensors" for file in files)
    for file in files:
        if file.suffix == ".safetensors":
            tensors, others = load_file(expected / file), load_file(found / file)
            assert tensors.keys() == others.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(others[name], tensor, rtol=0, atol=0, equal_nan=True)
        elif file.suffix in (".json", ".jsonl"):
            assert (expected / file).read_text() == (found / file).read_text(), file


@pytest.mark.parametrize("device", ["mps", "auto"])
def test_bf16_is_rejected(tmp_path, device):
    with RefusingDevice():
        with pytest.raises(ConfigError, match="precision='bf16' on device='mps'.*use fp32"):
            RLHFTrainer(RLHFArgs(**SMALL, device=device, precision="bf16"), out=tmp_path / "run")
        policy = TransformerWithValueHead(load_model("reel-nano")).to(torch.bfloat16)
        with pytest.raises(ConfigError, match="a policy in torch.bfloat16 on device='mps'"):
            RLHFTrainer(RLHFArgs(**SMALL, device=device), policy=policy, out=tmp_path / "run")
    RLHFTrainer(RLHFArgs(**SMALL, precision="bf16", device="cpu"), out=tmp_path / "run")


def test_exact_arithmetic_is_on_the_cpu():
    x, labels, model = torch.randn(8, 3), torch.arange(8) % 2 == 0, load_model("reel-nano")
    direction = fit_direction(x, labels).direction
    assert where_exact(x) is x and model_where_exact(model) is model
    assert exact(x).dtype == exact(x > 1).dtype == torch.float64
    with RefusingDevice():
        moved, projected = exact(x.to("mps")), project(x.to("mps"), direction)
        on_device = load_model("reel-nano", device="mps")
        copied = model_where_exact(on_device)
        assert on_device.W_E.device.type == "mps" and copied.W_E.device.type == "cpu"
    assert type(moved) is torch.Tensor and torch.equal(moved, x.double())
    assert torch.equal(projected, project(x, direction)) and torch.equal(copied.W_E, model.W_E)


def causal_attention(x):
    inputs = [x.bfloat16()[None, None]] * 3
    return nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)


REJECTED = [
    (lambda x: x.double(), TypeError, "support float64"),
    (lambda x: torch.ones(2, dtype=torch.float64).to("mps"), TypeError, "support float64"),
    (lambda x: torch.linalg.eigh(x @ x.T), NotImplementedError, "_linalg_eigh"),
    (lambda x: x.numpy(), TypeError, "to numpy"),
    (lambda x: x + torch.ones(2, 3), RuntimeError, "same device"),
    (lambda x: nn.Linear(3, 2)(x), RuntimeError, "same device"),
    (lambda x: x.exponential_(generator=torch.Generator()), RuntimeError, "generator"),
    (causal_attention, RuntimeError, "later keys"),
]


@pytest.mark.parametrize(("run", "error", "words"), REJECTED)
def test_stand_in_rejects_what_mps_rejects(run, error, words):
    with RefusingDevice(), pytest.raises(error, match=words):
        run(torch.arange(6.0, device="mps").view(2, 3))


FEW = "--steps 2 --batch-size 4 --held-out 0.2 --no-show-progress"
SAMPLED = f"{FEW} --samples 4 --gen-len 5"
TUNING = {
    "dpo of adapters": f"dpo --pairs reel --n-pairs 20 {SAMPLED} --lora-rank 2",
    "train-reward": f"train-reward --pairs reel --n-pairs 20 {FEW}",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", TUNING)
def test_commands_write_the_model_that_they_write_on_the_cpu(command, tmp_path):
    for device in ("cpu", "mps"):
        out = ["--out", str(tmp_path / device), "--device", device]
        with RefusingDevice():
            assert main([*TUNING[command].split(), *out]) == 0
    assert_same_files(tmp_path / "cpu", tmp_path / "mps")
