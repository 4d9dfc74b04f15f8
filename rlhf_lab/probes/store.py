"""Storage of probe records: JSON lines for numbers, safetensors for tensors."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.files import partial_file
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.probe import Record
from rlhf_lab.training import RunDir
from rlhf_lab.training.checkpoint import load_checkpoint, save_checkpoint
from rlhf_lab.training.run_dir import read_object, reading

FOLDER = "probes"
CHECKS = f"{FOLDER}/checks.jsonl"
NOTES = f"{FOLDER}/notes.jsonl"
SUITE, EVAL_TEXT = "suite.json", "eval_text.safetensors"
LONGEST_NOTE = 300


def records_file(probe: str) -> str:
    """The file of one probe's records, below the run's directory."""
    return f"{FOLDER}/records/{probe}.jsonl"


class ProbeStore:
    """The folder `probes/` of a run.

    `suite.json` lists the probes, `records/PROBE.jsonl`, `checks.jsonl` and `notes.jsonl` have one
    object per line, `tensors/PROBE/phase_000010.safetensors` is one file per phase, and
    `eval_text.safetensors` is the eval text if it was made for this run.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run

    path = property(lambda self: self.run.path / FOLDER)

    def write_suite(self, settings: dict[str, Any]) -> None:
        """Add these probes to the list of all suites, and make the folders."""
        names = {probe["name"] for probe in settings["probes"]}
        others = [p for p in self.read_suite()["probes"] if p["name"] not in names]
        settings = settings | {"probes": others + settings["probes"]}
        (self.path / "records").mkdir(parents=True, exist_ok=True)
        (self.path / "tensors").mkdir(exist_ok=True)
        with partial_file(self.path / SUITE) as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def keep_text(self, text: EvalText) -> None:
        """Store eval text once, for the run after a resume."""
        path = self.path / EVAL_TEXT
        if not path.exists():
            parts = {"tokens": text.tokens.int(), "attention_mask": text.attention_mask}
            save_checkpoint(path, parts, {"phase": 0})

    def kept_text(self) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]] | None:
        """Return the tokens and the mask that `keep_text` stored, or None."""
        if not (path := self.path / EVAL_TEXT).exists():
            return None
        tensors, _ = load_checkpoint(path)
        with reading(path):
            return tensors["tokens"].long(), tensors["attention_mask"]

    def read_suite(self) -> dict[str, Any]:
        """Return the stored suite; no probes if the run had none."""
        path = self.path / SUITE
        if not path.is_file():
            return {"probes": []}
        suite = read_object(path)
        with reading(path):  # raises RunError if the file is damaged
            _ = [(probe["name"], probe["kind"]) for probe in suite["probes"]]
        return suite

    def write(self, probe: str, phase: int, record: Record) -> None:
        """Store a record and its checks, after its tensors."""
        path = self.tensor_path(probe, phase)
        if record.tensors:
            path.parent.mkdir(parents=True, exist_ok=True)
            # safetensors takes neither views of one memory nor transposed tensors
            tensors = {name: t.clone() for name, t in record.tensors.items()}
            metadata = {"run": self.run.read_info()["id"], "probe": probe, "phase": phase}
            save_checkpoint(path, tensors, metadata, flush=False)  # 5 ms, more than the rest
        self.run.append(records_file(probe), [{"phase": phase, **record.values}])
        checks = [
            {"phase": phase, "probe": probe, **dataclasses.asdict(check)}
            | {"value": check.value if math.isfinite(check.value) else None}
            for check in record.checks
        ]
        self.run.append(CHECKS, checks)

    def note(self, phase: int, probe: str, note: str) -> None:
        """Store a note about a probe."""
        shortened = note if len(note) <= LONGEST_NOTE else note[:LONGEST_NOTE] + " ..."
        self.run.append(NOTES, [{"phase": phase, "probe": probe, "note": shortened}])

    def tensor_path(self, probe: str, phase: int) -> Path:
        """Return the path of one probe's tensors in one phase."""
        return self.path / "tensors" / probe / f"phase_{phase:06d}.safetensors"

    def rewind(self, phase: int, probes: list[str]) -> None:
        """Remove what these probes stored from this phase on, before it is done again."""
        for file in (CHECKS, NOTES):
            self.run.keep(file, lambda r: r["phase"] < phase or r["probe"] not in probes)
        for probe in probes:
            self.run.keep(records_file(probe), lambda record: record["phase"] < phase)
            for path in self.path.glob(f"tensors/{probe}/phase_*.safetensors"):
                if int(path.stem.removeprefix("phase_")) >= phase:
                    path.unlink()
