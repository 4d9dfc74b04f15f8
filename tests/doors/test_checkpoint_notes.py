"""Checkpoints whose checksum fits, and whose notes or moments are not those of a run."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.doors.door import refused, untouched

NOTES = {
    "a list": [1],
    "a number": 3,
    "nothing": {},
    "phase of text": {"phase": "1"},
    "phase below 0": {"phase": -1},
    "phase as a flag": {"phase": True},
    "phase missing": {"phase": ...},
    "no schedule": {"scheduler": ...},
    "schedule of text": {"scheduler": "late"},
    "schedule of one rate": {"scheduler": {"last_epoch": 1, "_step_count": 2, "_last_lr": [0.1]}},
    "schedule without a count": {"scheduler": {"last_epoch": 1}},
    "kl_coef of text": {"kl_coef": "0.3"},
    "kl_coef nan": {"kl_coef": float("nan")},
    "kl_coef missing": {"kl_coef": ...},
    "best as a number": {"best": 3},
    "best without a phase": {"best": {"mean_reward": 1.0}},
    "moments of text": {"reward_moments": {"count": "1", "mean": 0.0, "m2": 0.0}},
    "moments below 0": {"reward_moments": {"count": 1, "mean": 0.0, "m2": -1.0}},
    "moments of another name": {"reward_moments": {"number": 1}},
}


@pytest.mark.parametrize("name", NOTES)
def test_notes_of_no_run(here: Path, name: str) -> None:
    change = NOTES[name]

    def changed(tensors: dict[str, Any], notes: dict[str, Any]) -> Any:
        if not isinstance(change, dict) or not change:
            return tensors, change
        return tensors, {k: v for k, v in (notes | change).items() if v is not ...}

    rewrite(here / "RUN" / "checkpoints" / "last.safetensors", changed)
    words = "parameter groups" if name == "schedule of one rate" else "notes"
    with untouched(here / "RUN"):
        refused(["resume", "RUN"], "last.safetensors", words)


def test_a_moment_of_another_shape(here: Path) -> None:
    def changed(tensors: dict[str, Any], notes: Any) -> Any:
        name = next(name for name in tensors if name.endswith(".exp_avg"))
        return tensors | {name: torch.zeros(3)}, notes

    rewrite(here / "RUN" / "checkpoints" / "last.safetensors", changed)
    with untouched(here / "RUN"):
        refused(["resume", "RUN"], "no fitting", "exp_avg")


@pytest.mark.parametrize("command", ["resume", "report"])
@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl"])
def test_json_of_great_depth(here: Path, file: str, command: str) -> None:
    (here / "RUN" / file).write_text("[" * 100_000 + "\n")
    with untouched(here / "RUN"):
        refused([command, "RUN"], file)


def rewrite(path: Path, change: Callable[[Any, Any], Any]) -> None:
    """Write a checkpoint anew with other contents and a checksum that fits them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        tensors, notes = change(tensors, json.loads(file.metadata()["notes"]))
    written = json.dumps(notes)
    crc = zlib.crc32(written.encode())
    for name in sorted(tensors):
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, zlib.crc32(name.encode(), crc))
    save_file(tensors, path, metadata={"notes": written, "crc32": str(crc)})
