"""Tests what is chosen by the device: TF32 products, and the sizes of the read-out's chunks."""

import pytest
import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import Forward, run_policy
from rlhf_lab.models.device import (
    LOGPROB_ROUNDING,
    float32_products,
    pick_device,
    refuse_tf32,
    total_memory,
)
from rlhf_lab.models.fast import proof
from rlhf_lab.models.fast.readout import chunk_sizes
from tests.tf32 import RoundsToTF32, rounded

GIB = 2**30
SMALL = {"preset": "reel", "total_phases": 3, "warmup_steps": 1, "batch_size": 16, "gen_len": 12}


def products():
    return torch.backends.cuda.matmul.fp32_precision


@pytest.mark.parametrize(("precision", "within"), [("tf32", "tf32"), ("fp32", "ieee")])
def test_products_are_of_this_precision_within_and_as_before_afterwards(precision, within):
    before = products()
    with pytest.raises(KeyError), float32_products(precision):
        assert products() == within
        raise KeyError
    assert products() == before


def test_a_phase_in_tf32_multiplies_in_it(tmp_path, monkeypatch):
    """Sampling, scoring and learning, also where they are called by themselves."""
    seen = {}
    monkeypatch.setattr("rlhf_lab.training.parts.refuse_tf32", lambda device, precision: None)
    trainer = RLHFTrainer(RLHFArgs(**SMALL, precision="tf32"), out=tmp_path / "run")
    for event in ("after_rollout", "after_score", "after_loss", "after_backward", "after_phase"):
        trainer.on(event)(lambda ctx, event=event: seen.update({event: products()}))
    before = products()
    trainer.run_phase()
    assert set(seen.values()) == {"tf32"} and len(seen) == 5
    assert products() == before
    seen.clear()
    trainer.learning_phase(trainer.rollout_phase())
    assert set(seen.values()) == {"tf32"} and len(seen) == 4
    assert products() == before


@pytest.mark.parametrize(("precision", "during"), [("tf32", "ieee"), ("fp32", "none")])
def test_the_proof_of_a_run_in_tf32_is_made_in_float32(precision, during, tmp_path, monkeypatch):
    """And allows what was noted in TF32 its rounding; a run in fp32 touches no setting."""
    monkeypatch.setattr("rlhf_lab.training.parts.refuse_tf32", lambda device, precision: None)
    trainer = RLHFTrainer(RLHFArgs(**SMALL, precision=precision), out=tmp_path / "run")
    seen = []

    def by_modules(*arguments):
        seen.append(products())
        return real(*arguments)

    real = proof._by_modules
    monkeypatch.setattr(proof, "_by_modules", by_modules)
    trainer.run_phase()
    assert set(seen) == {during}


def test_a_phase_in_fp32_leaves_the_setting_of_the_process_alone(tmp_path):
    seen = []
    trainer = RLHFTrainer(RLHFArgs(**SMALL), out=tmp_path / "run")
    trainer.on("after_loss")(lambda ctx: seen.append(products()))
    before = products()
    trainer.run_phase()
    assert set(seen) == {before}


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_tf32_is_refused_where_there_is_none(device):
    with pytest.raises(ConfigError, match=f"precision='tf32' on device='{device}'.*'fp32'"):
        refuse_tf32(torch.device(device), "tf32")
    refuse_tf32(torch.device(device), "fp32")
    refuse_tf32(torch.device(device), "bf16")


@pytest.mark.parametrize(("capability", "there"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_tf32_is_there_from_ampere_on(capability, there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if there:
        refuse_tf32(torch.device("cuda"), "tf32")
    else:
        with pytest.raises(ConfigError, match="Ampere"):
            refuse_tf32(torch.device("cuda"), "tf32")


def test_a_run_that_asks_for_tf32_on_the_cpu_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="precision='tf32'"):
        RLHFTrainer(RLHFArgs(**SMALL | {"device": "cpu"}, precision="tf32"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("version", "there"),
    [("2.9.0", False), ("2.12.1", False), ("2.13.0", True), ("2.13.0+cpu", True), ("2.20", True)],
)
@pytest.mark.parametrize("name", ["mps", "auto"])
def test_mps_is_refused_with_a_torch_that_is_too_old(version, there, name, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", version)
    assert pick_device("cpu").type == "cpu"
    if there:
        assert pick_device(name).type == "mps"
        return
    with pytest.raises(ConfigError, match=f"needs torch 2.13 or newer.*this is {version}"):
        pick_device(name)


def test_rounding_to_tf32_by_hand():
    """10 bits of mantissa: 1 + 2^-10 stays, 1 + 2^-11 is a tie and goes up, 1 + 2^-12 goes down."""
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 0.0, 3.0])
    assert rounded(x).tolist() == [1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10, 0.0, 3.0]


def test_what_tf32_rounds_stays_within_what_is_allowed(tmp_path):
    """Factors of products rounded on the CPU, as CUDA's matrix units do: ratio, noted log-probs."""
    trainer = RLHFTrainer(RLHFArgs(**SMALL), out=tmp_path / "run")
    with RoundsToTF32() as mode:
        samples = trainer.rollout_phase().samples
    assert mode.count > 50
    with torch.no_grad():
        outputs = run_policy(
            trainer.policy,
            samples.tokens,
            samples.prefix_len,
            attention_mask=samples.attention_mask,
            support=samples.support,
            forward=Forward("hooked"),
        )
    gap = (outputs.logprobs - samples.logprobs)[samples.mask].abs().max().item()
    assert 1e-5 < gap < LOGPROB_ROUNDING["tf32"] / 4
    assert LOGPROB_ROUNDING["fp32"] < LOGPROB_ROUNDING["tf32"] < LOGPROB_ROUNDING["bf16"]


@pytest.mark.parametrize(
    ("d_vocab", "memory", "expected"),
    [
        (72, None, (58_254, 2**29)),
        (50_257, None, (256, 2**29)),
        (50_257, 4 * GIB, (256, 2**29)),
        (50_257, 24 * GIB, (500, int(1.5 * GIB))),
        (50_257, 140 * GIB, (2920, int(8.75 * GIB))),
    ],
)
def test_chunks_grow_with_the_memory_of_the_device(d_vocab, memory, expected):
    """By hand: 24 GiB / 256 / 4 bytes are 25,165,824 logits, 500 rows of 50,257; 24 / 16 = 1.5."""
    found = chunk_sizes(d_vocab, memory)
    assert (found[0], found[1]) == expected


def test_only_cuda_has_a_memory_of_its_own(monkeypatch):
    class Properties:
        total_memory = 7 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert total_memory(torch.device("cuda")) == 7 * GIB
    assert total_memory(torch.device("cpu")) is None and total_memory(torch.device("mps")) is None
