"""MPS without a Mac: what trains runs on a device that refuses, with the numbers of the CPU."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.torch_version import TorchVersion

from rlhf_lab import tuning_commands
from rlhf_lab.config import AdapterArgs, ChatArgs, RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss, RewardLoss
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.device import MPS_TORCH, exact, where_exact
from rlhf_lab.models.export import export_policy
from rlhf_lab.models.reference import model_where_exact
from rlhf_lab.probes import Budget, Run, attach, default_suite
from rlhf_lab.probes.direction import fit_direction, project
from rlhf_lab.training import RLHFTrainer, phase_stats
from rlhf_lab.training.phase_stats import clipped_fraction
from tests.refusing_device import RefusingDevice

pytestmark = [
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.skipif(TorchVersion(torch.__version__) < MPS_TORCH, reason="refused on MPS"),
]

SMALL = {
    "preset": "reel",
    "total_phases": 2,
    "batch_size": 8,
    "num_minibatches": 2,
    "warmup_steps": 1,
    "gen_len": 5,
}
MAY_READ = {
    "models/decode.py:distinct_rows": "how many distinct prompts there are",
    "models/decode.py:__init__": "whether prompts are padded",
    "models/hooked_transformer.py:padding_mask": "whether a mask hides anything",
    "samples.py:is_padded": "whether prompts are padded",
    "models/padding.py:run_left_padded": "whether a mask hides anything",
    "sampling.py:take": "the width of the nucleus, where the vocabulary is wide",
    "sampling.py:_sample": "whether all rows have stopped",
    "sampling.py:_gather_support": "how many tokens truncation left",
    "rewards/conversation.py:chat_answers": "tokens of the answers, in a chat",
    "samples.py:texts": "tokens for the reward's texts",
    "samples.py:prompt_texts": "tokens of the prompts, for the recorder",
    "samples.py:prompts": "tokens of the prompts, for the greedy baseline",
    "rewards/sentiment.py:sentiment_reward": "whether the reward's texts are padded",
    "rewards/scoring.py:score_texts": "whether the rewards are finite",
    "models/reference.py:same_weights": "whether the policy is still the reference",
    "functional/advantages.py:explained_variance": "statistics",
    "training/rollout.py:summarize": "statistics",
    "training/phase_stats.py:learning_stats": "statistics",
    "training/report.py:cost_of": "statistics",
    "training/phase_stats.py:judge": "whether the policy has moved too far",
    "training/replay.py:get_minibatches": "whether prompts are padded",
    "training/optimization.py:step_if": "whether a gradient is finite",
    "training/recorder.py:save_best": "the recorder",
    "training/diagnostics.py:broken_weight": "whether weights are finite, when a run starts",
    "training/diagnostics.py:_signs": "whether penalties made all rewards equal",
    "training/input_digests.py:weights_digest": "the models' checksum, when a run starts",
    "training/rollout.py:sample_lines": "the recorder",
    "training/checkpoint_writer.py:copied_to_host": "the recorder",
}
"""Where the host may read within a phase, and what."""


def train_on_both(
    directory: Path,
    probes: bool = False,
    intervenes: bool = False,
    may_read: tuple[str, ...] | None = tuple(MAY_READ),
    **fields: Any,
) -> list[RLHFTrainer]:
    """Trains on the CPU and on the device, within its phases where nothing else is said."""
    trainers = []
    for name in ("cpu", "mps"):
        args = RLHFArgs(**(SMALL | fields), device=name)
        with RefusingDevice(may_read=may_read) as device:
            trainers.append(trainer := RLHFTrainer(args, out=directory / name))
            assert trainer.policy.device.type == name
            if intervenes:
                trainer.intervene("blocks.0.hook_mlp_out", lambda act, where: 0.9 * act)
            if probes:
                attach(trainer, default_suite(trainer, Budget(mb=1000, time_frac=1000)))
            with device.phase():
                trainer.train()
        assert not device.refused
    return trainers


@pytest.fixture
def runs_of(tmp_path: Path) -> Callable[..., list[RLHFTrainer]]:
    """`train_on_both`, in a directory of the test's own."""
    return functools.partial(train_on_both, tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[RLHFTrainer]:
    """One run on the CPU and one on the device, which no test trains further."""
    return train_on_both(tmp_path_factory.mktemp("trained"))


def metrics_of(trainer: RLHFTrainer) -> list[dict[str, Any]]:
    lines = (trainer.run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in lines]


def assert_same_runs(on_cpu: RLHFTrainer, on_device: RLHFTrainer) -> None:
    """The same numbers in every phase, and the same weights, bit for bit."""
    assert metrics_of(on_cpu) == metrics_of(on_device)
    weights = dict(on_device.policy.named_parameters())
    for name, weight in on_cpu.policy.named_parameters():
        assert torch.equal(weight, weights[name].detach().cpu()), name


def test_a_run_is_that_of_the_cpu(trained):
    assert_same_runs(*trained)


PLANTED = {
    "item": lambda x: x.sum().item(),
    "float64": lambda x: x.double(),
    "the host's tensor": lambda x: x + torch.ones(x.shape),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PLANTED)
def test_what_mps_does_not_do_is_refused_in_the_middle_of_a_phase(tmp_path, monkeypatch, what):
    def plant(logprobs, minibatch, args):
        PLANTED[what](logprobs)
        return clipped_fraction(logprobs, minibatch, args)

    monkeypatch.setattr(phase_stats, "clipped_fraction", plant)
    with RefusingDevice(may_read=tuple(MAY_READ)) as device:
        trainer = RLHFTrainer(RLHFArgs(**SMALL, device="mps"), out=tmp_path / "run")
        with device.phase(), pytest.raises((RuntimeError, TypeError)):
            trainer.run_phase()
    ((_, place),) = device.refused
    assert place.startswith("training/phase_stats.py:add")


SETTINGS = {
    "truncated, stopped, adapters": {
        "top_k": 5,
        "top_p": 0.9,
        "stop_tokens": "movie,film",
        "gen_len": 10,
        "lora_rank": 2,
    },
    "a critic, recomputed, in micro-batches, paid KL": {
        "value_head": "separate",
        "activation_checkpointing": True,
        "micro_batch_size": 2,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "advantages": "gae",
        "target_kl": 1.0,
    },
    "groups, step in backward": {
        "advantages": "grpo",
        "samples_per_prompt": 4,
        "kl_estimator": "k3",
        "max_grad_norm": None,
        "optimizer_in_backward": True,
    },
    "greedy baseline": {"advantages": "remax", "normalize_reward": False},
}
"""Of one phase, whose first step is not a step of 0."""


@pytest.mark.slow
@pytest.mark.parametrize("what", SETTINGS)
def test_so_is_a_run_with_other_settings(runs_of, what):
    assert_same_runs(*runs_of(**SETTINGS[what], total_phases=1, warmup_steps=0))


@pytest.mark.slow
def test_so_is_a_run_of_a_llama(runs_of, llama_dir):
    fields = {"base_model": str(llama_dir), "reward_fn": "count:w1", "prefix": "w3 w4"}
    assert_same_runs(*runs_of(**fields))


@pytest.mark.slow
def test_a_learned_reward_pays_there_as_on_the_cpu(runs_of, tmp_path):
    assert tune("train-reward", tmp_path / "reward", "cpu") == 0
    fields = {"reward_fn": "learned", "reward_model": str(tmp_path / "reward")}
    assert_same_runs(*runs_of(**fields, may_read=None))
    of_tokens = {"reward_per_token": True, "normalize_reward": False, "total_phases": 1}
    there = tmp_path / "of tokens"
    assert_same_runs(*train_on_both(there, may_read=None, warmup_steps=0, **fields, **of_tokens))


@pytest.mark.slow
def test_a_run_is_resumed_on_the_device_that_it_was_begun_on(trained, tmp_path):
    with RefusingDevice():
        args = RLHFArgs(**SMALL, device="mps")
        RLHFTrainer(args, out=tmp_path / "begun").run_phase()
        resumed = RLHFTrainer.resume(tmp_path / "begun")
        assert resumed.policy.device.type == "mps" and resumed.phase == 1
        resumed.train()
        assert_same_runs(trained[0], resumed)


PROBED = {
    "on Reel": {"gen_len": 26},
    "with an intervention": {"intervenes": True},
    "on tiny GPT-2": {"reward_fn": "count:w1", "prefix": "w3 w4", "top_k": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PROBED)
def test_every_default_probe_records_what_it_records_on_the_cpu(runs_of, gpt2_dir, what):
    elsewhere = what == "on tiny GPT-2"
    fields = PROBED[what] | ({"base_model": str(gpt2_dir)} if elsewhere else {})
    trainers = runs_of(probes=True, may_read=None, **fields)
    assert_same_runs(*trainers)
    on_cpu, on_device = (Run(trainer.run.path) for trainer in trainers)
    assert on_cpu.probes() == on_device.probes()
    assert len(on_device.probes()) == (6 if elsewhere else 8)
    assert [check for check in on_device.checks() if not check.ok] == []
    for name in on_cpu.probes():
        assert on_cpu.records(name) == on_device.records(name)
    assert_same_files(on_cpu.store.path, on_device.store.path)


@pytest.mark.slow
def test_a_policy_on_the_device_is_exported_as_from_the_cpu(trained, tmp_path):
    with RefusingDevice():
        for trainer in trained:
            out = tmp_path / "exported" / trainer.device.type
            _, gap = export_policy(trainer.policy, "reel-nano", out)
            assert gap.weighed < 1e-5
    assert_same_files(tmp_path / "exported" / "cpu", tmp_path / "exported" / "mps")


def assert_same_files(expected: Path, found: Path) -> None:
    """The same tensors in two models' directories, and the same notes beside them."""
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
def test_bf16_is_refused_where_causal_attention_is_wrong_in_it(tmp_path, device):
    """Also of a policy that is in half precision itself."""
    with RefusingDevice():
        with pytest.raises(ConfigError, match="precision='bf16' on device='mps'.*use fp32"):
            RLHFTrainer(RLHFArgs(**SMALL, device=device, precision="bf16"), out=tmp_path / "run")
        policy = TransformerWithValueHead(load_model("reel-nano")).to(torch.bfloat16)
        with pytest.raises(ConfigError, match="a policy in torch.bfloat16 on device='mps'"):
            RLHFTrainer(RLHFArgs(**SMALL, device=device), policy=policy, out=tmp_path / "run")
    RLHFTrainer(RLHFArgs(**SMALL, precision="bf16", device="cpu"), out=tmp_path / "run")


def test_exact_arithmetic_stays_on_the_cpu_and_goes_there_from_mps():
    x = torch.tensor([1.0, 2.0])
    assert where_exact(x) is x
    assert exact(x).dtype == exact(x > 1).dtype == torch.float64
    with RefusingDevice():
        moved = exact(x.to("mps"))
    assert type(moved) is torch.Tensor and torch.equal(moved, x.double())


def test_activations_on_the_device_are_projected_on_a_direction_that_was_fitted_on_the_cpu():
    x, labels = torch.randn(8, 3), torch.arange(8) % 2 == 0
    direction = fit_direction(x, labels).direction
    with RefusingDevice():
        found = project(x.to("mps"), direction)
    assert torch.equal(found, project(x, direction))


def test_a_model_on_the_device_is_copied_to_the_cpu_and_one_on_the_cpu_is_not():
    model = load_model("reel-nano")
    assert model_where_exact(model) is model
    with RefusingDevice():
        moved = load_model("reel-nano", device="mps")
        copied = model_where_exact(moved)
        assert moved.W_E.device.type == "mps" and copied.W_E.device.type == "cpu"
        assert torch.equal(copied.W_E, model.W_E)


FEW = FitConfig(steps=2, batch_size=4, held_out=0.2, show_progress=False)
OWN = DriftEvalConfig(4, 5)
TUNING = {
    "sft": (tuning_commands.sft, {"chat": ChatArgs(), "n_texts": 20}),
    "dpo": (tuning_commands.dpo, {"loss": DPOLoss(), "n_pairs": 20}),
    "kto": (tuning_commands.kto, {"loss": KTOLoss(), "n_pairs": 20}),
    "orpo": (tuning_commands.orpo, {"loss": ORPOLoss(), "n_pairs": 20}),
}


def tune(command: str, out: Path, device: str) -> int:
    """Run a tuning command with few steps."""
    if command == "train-reward":
        options = {"n_pairs": 20, "fitting": FEW, "device": device}
        return tuning_commands.train_reward("reel", out, RewardLoss(), **options)
    function, options = TUNING[command.removesuffix(" of adapters")]
    adapters = AdapterArgs(lora_rank=2 if command.endswith("adapters") else 0)
    return function(
        "reel", out, adapters=adapters, own_texts=OWN, fitting=FEW, device=device, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", [*TUNING, "dpo of adapters", "train-reward"])
def test_a_command_makes_the_model_that_it_makes_on_the_cpu(command, tmp_path):
    for device in ("cpu", "mps"):
        with RefusingDevice():
            assert tune(command, tmp_path / device, device) == 0
    assert_same_files(tmp_path / "cpu", tmp_path / "mps")
