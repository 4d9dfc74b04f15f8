"""Storage of probe records: JSON lines for numbers, safetensors for tensors."""

import dataclasses
import json
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlhf_lab.probes.probe import Record
from rlhf_lab.training import RunDir
from rlhf_lab.training.checkpoint import save_checkpoint
from rlhf_lab.training.run_dir import PHASE, Fields, read_object, reading, replacing

FOLDER = "probes"
CHECKS = f"{FOLDER}/checks.jsonl"
NOTES = f"{FOLDER}/notes.jsonl"
NOTE: Fields = MappingProxyType(PHASE | {"probe": str, "note": str})


def records_file(probe: str) -> str:
    """The file of one probe's records, below the run's directory."""
    return f"{FOLDER}/records/{probe}.jsonl"


class ProbeStore:
    """The folder `probes/` of a run.

    `records/PROBE.jsonl`, `checks.jsonl` and `notes.jsonl` only grow, a line at a time;
    `tensors/PROBE/phase_000010.safetensors` has one file per phase; `suite.json` says which probes
    there were. Everything can be read without this package.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.path = run.path / FOLDER

    def write_suite(self, settings: dict[str, Any]) -> None:
        """Note which probes are attached, beside those of other suites, and make the folders."""
        names = {probe["name"] for probe in settings["probes"]}
        others = [p for p in self.read_suite()["probes"] if p["name"] not in names]
        settings = settings | {"probes": others + settings["probes"]}
        (self.path / "records").mkdir(parents=True, exist_ok=True)
        (self.path / "tensors").mkdir(exist_ok=True)
        with replacing(self.path / "suite.json") as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def read_suite(self) -> dict[str, Any]:
        """What `write_suite` noted; no probes when the run had none.

        Raises:
            RunError: the file is not what `write_suite` writes.
        """
        path = self.path / "suite.json"
        if not path.is_file():
            return {"probes": []}
        suite = read_object(path)
        with reading(path):
            _ = [(probe["name"], probe["kind"]) for probe in suite["probes"]]
        return suite

    def write(self, probe: str, phase: int, record: Record) -> None:
        """Store a record, its checks and its tensors.

        The tensors go first, so that a record that is there is whole.
        """
        if record.tensors:
            path = self.tensor_path(probe, phase)
            path.parent.mkdir(parents=True, exist_ok=True)
            # copies, as safetensors takes neither views of one memory nor transposed ones
            tensors = {
                name: t.detach().clone(memory_format=torch.contiguous_format)
                for name, t in record.tensors.items()
            }
            save_checkpoint(path, tensors, {"probe": probe, "phase": phase})
        self.run.append(records_file(probe), [{"phase": phase, **record.values}])
        checks = [
            {"phase": phase, "probe": probe, **dataclasses.asdict(check)}
            | {"value": check.value if math.isfinite(check.value) else None}
            for check in record.checks
        ]
        self.run.append(CHECKS, checks)

    def note(self, phase: int, probe: str, note: str) -> None:
        """Store something that was said about a probe."""
        self.run.append(NOTES, [{"phase": phase, "probe": probe, "note": note}])

    def tensor_path(self, probe: str, phase: int) -> Path:
        """The file of one probe's tensors in one phase."""
        return self.path / "tensors" / probe / f"phase_{phase:06d}.safetensors"

    def stored_bytes(self, probe: str) -> int:
        """The size of a probe's records and tensors."""
        files = [self.run.path / records_file(probe), *self.path.glob(f"tensors/{probe}/*")]
        return sum(file.stat().st_size for file in files if file.exists())

    def rewind(self, phase: int, probes: list[str]) -> None:
        """Drop what these probes stored from this phase on, which is about to be done again."""

        for file in (CHECKS, NOTES):
            self.run.keep(file, lambda r: r["phase"] < phase or r["probe"] not in probes)
        for probe in probes:
            self.run.keep(records_file(probe), lambda record: record["phase"] < phase)
            for path in self.path.glob(f"tensors/{probe}/phase_*.safetensors"):
                if int(path.stem.removeprefix("phase_")) >= phase:
                    path.unlink()
