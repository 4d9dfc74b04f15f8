"""Runs on several processes with whole and sharded weights, compared with one process."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.training.checkpoint import load_checkpoint
from tests.parallel.conftest import Ended
from tests.parallel.runs import SETTINGS, WATCHED

pytestmark = pytest.mark.process

CODE = """
from tests.parallel import runs
report(**runs.run_all(folder, {!r}, {!r}))
"""
OF_PROCESS = {"seconds", "rollout_seconds", "learning_seconds", "peak_memory_bytes"}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")
GROUPS = [
    pytest.param(("ddp", 2, "cpu"), marks=pytest.mark.nightly),
    ("fsdp", 2, "cpu"),
    pytest.param(("fsdp", 1, "cuda"), marks=NO_GPU),
]


class Compared(NamedTuple):
    """The same settings in one process and in several, with their folders."""

    kind: str
    alone: Ended
    ranks: list[Ended]
    folders: tuple[Path, Path]

    def values(self, name: str) -> list[Any]:
        """Return what a setting reported in one process, then in each of several."""
        return [ended.values[name] for ended in (self.alone, *self.ranks)]


@pytest.fixture(scope="module", params=GROUPS, ids=str)
def compared(request, launch, tmp_path_factory) -> Compared:
    kind, n, device = request.param
    folders = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("several")
    (alone,) = launch(folders[0], 1, CODE.format("auto", device), is_launched=False)
    ranks = launch(folders[1], n, CODE.format(kind, device))
    for ended in (alone, *ranks):
        assert ended.status == 0, ended.error
    return Compared(kind, alone, ranks, folders)


def flatten(value: Any, name: str = "") -> dict[str, float]:
    """Return all numbers of nested objects by path, without times and memory."""
    if isinstance(value, dict):
        parts = [flatten(x, f"{name}.{key}") for key, x in value.items() if key not in OF_PROCESS]
    elif isinstance(value, list):
        parts = [flatten(x, f"{name}[{i}]") for i, x in enumerate(value)]
    else:
        is_number = isinstance(value, int | float) and "per_second" not in name
        return {name: float(value)} if is_number else {}
    return {key: x for part in parts for key, x in part.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_several_processes_match_one(compared, name):
    one, *ranks = compared.values(name)
    assert len(one["reports"]) == (1 if name == "stopped" else 2)
    expected = flatten(one["reports"])
    assert len(expected) > 20
    assert flatten(ranks[0]["reports"]) == pytest.approx(expected, rel=2e-5, abs=2e-5)
    assert len({rank["weights"] for rank in ranks}) == 1
    assert ranks[0]["weights"] == pytest.approx(one["weights"], abs=2e-3)
    if compared.kind == "fsdp":
        held = [rank["held"] for rank in ranks]
        assert sum(held) == one["whole"]
        assert max(held) < 1.2 * one["whole"] / len(ranks)
        assert all(0.9 * rank["held"] < rank["moments"] / 2 <= rank["held"] for rank in ranks)


@pytest.mark.parametrize("name", WATCHED)
def test_callbacks_read_whole_weights_and_gradients(compared, name):
    """The first gradient differs by at most 1e-6 of its length; callbacks run in rank 0."""
    before, after = (load_file(folder / f"{name}.safetensors") for folder in compared.folders)
    assert before.keys() == after.keys() and len(before) > 5
    squares = [
        ((after[k] - x).double().square().sum(), x.square().sum()) for k, x in before.items()
    ]
    difference, length = map(sum, zip(*squares, strict=True))
    assert (difference / length).sqrt() < 1e-6
    one, first, *others = compared.values(name)
    assert first["steps"] == pytest.approx(one["steps"], rel=2e-4, abs=2e-3)
    assert all(rank["steps"] == [] for rank in others)


def test_hooks_and_rewards_read_the_rows_of_their_rank(compared):
    one, *ranks = (values["activations"] for values in compared.values("ppo"))
    assert len(one) == 10
    for hook_name, rows in one.items():
        of_ranks = [x for rank in ranks for x in rank[hook_name]]
        assert of_ranks == pytest.approx(rows, rel=1e-4), hook_name
    for values in compared.values("custom")[1:]:  # one batch per phase after the trial
        assert values["read"][-2:] == [16 / len(ranks)] * 2


def test_run_files_match_those_of_one_process(compared):
    """Samples are equal; checkpoints have the same tensors, shapes and dtypes."""
    runs = [folder / "ppo" for folder in compared.folders]
    before, after = ((run / "samples.jsonl").read_text().splitlines() for run in runs)
    assert len(before) == 2 * 16 + 16
    assert [json.loads(x)["text"] for x in before] == [json.loads(x)["text"] for x in after]
    before, after = (load_checkpoint(run / "checkpoints/last.safetensors")[0] for run in runs)
    assert before.keys() == after.keys() and len(before) > 100
    for name, tensor in before.items():
        assert (after[name].shape, after[name].dtype) == (tensor.shape, tensor.dtype), name
        if not name.endswith("b_K"):  # whose gradient is only rounding
            assert (after[name] - tensor).abs().mean() < 1e-5, name


def test_learning_in_a_callback_is_rejected_with_shards(compared):
    message = "parallel='fsdp' learns with all processes, and a callback runs in one"
    assert (message in compared.ranks[0].error) == (compared.kind == "fsdp")


def test_each_engine_samples_rows_with_current_weights(compared):
    _, first, *others = compared.values("engine")
    assert all(rank["loads"] == 2 for rank in (first, *others))
    seeds = {seed for rank in (first, *others) for seed in rank["seeds"]}
    assert len(seeds) == 2 * len(compared.ranks), "one per process and phase"
    assert len(first["gaps"]) == 2 and max(first["gaps"]) < 2e-5
