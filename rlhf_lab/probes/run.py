"""Run: metrics, samples, probe records and checkpoints of a stored run, without a trainer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.files import AnyPath
from rlhf_lab.identity import Check
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.probes.store import CHECKS, NOTES, ProbeStore, records_file
from rlhf_lab.training import RunDir
from rlhf_lab.training.callbacks import switched_off
from rlhf_lab.training.capture import InterventionFn
from rlhf_lab.training.checkpoint import load_checkpoint
from rlhf_lab.training.resume import load_policy
from rlhf_lab.training.run_dir import METRICS, RETURNED, SAMPLES, reading


@dataclass(frozen=True)
class StoredCheck(Check):
    """A check as it was stored."""

    phase: int
    probe: str


class Run:
    """A stored run: finished, stopped, or in progress.

    Args:
        path: the run's directory, or a trainer's `run`.

    Raises:
        RunError: If the directory has no run.
    """

    def __init__(self, path: AnyPath) -> None:
        self.directory = RunDir.open(path)
        self.store = ProbeStore(self.directory)

    __fspath__ = lambda self: str(self.path)
    path = property(lambda self: self.directory.path)  # the run's directory

    @property
    def info(self) -> dict[str, Any]:
        """The contents of run.json: arguments, versions, final metrics."""
        return self.directory.read_info()

    @property
    def args(self) -> RLHFArgs:
        """The run's settings."""
        return RLHFArgs(**self.info["args"])

    def metrics(self) -> list[dict[str, Any]]:
        """Return one dict per phase, as in `PhaseReport.to_dict`."""
        return self.directory.read(METRICS)

    def samples(self, phase: int | None = None) -> list[dict[str, Any]]:
        """Return the samples of one phase (-1 for the last) or all: text, reward, true reward.

        A phase is the number of learning phases before it; a finished run has some of its end.

        Raises:
            RunError: If the phase has no samples.
        """
        lines = self.directory.read(SAMPLES)
        return lines if phase is None else select_phase(lines, phase, "samples", self)

    def probes(self) -> list[str]:
        """Return the names of probes with records."""
        return sorted(path.stem for path in self.store.path.glob("records/*.jsonl"))

    def kinds(self) -> dict[str, str]:
        """Return the class of each probe with records by name, in the order of the suite."""
        names, suite = self.probes(), self.store.read_suite()["probes"]
        return {probe["name"]: probe["kind"] for probe in suite if probe["name"] in names}

    def find_probe(self, kind: str) -> str | None:
        """Return the name of the first probe of a class with records, None without one."""
        return next((name for name, other in self.kinds().items() if other == kind), None)

    def records(self, probe: str) -> list[dict[str, Any]]:
        """Return the records of a probe, in the order of phases.

        Raises:
            RunError: If no probe of this name has records.
        """
        if probe not in self.probes():
            known = f"Available: {', '.join(self.probes()) or 'none'}."
            if probe in self.functions():
                known = f"Use returned({probe!r}) for the dicts of that function."
            raise RunError(f"{self.path} has no records of probe {probe!r}. {known}")
        return self.directory.read(records_file(probe))

    def phases(self, probe: str) -> list[int]:
        """Return the phases of a probe's records."""
        return [record["phase"] for record in self.records(probe)]

    def tensors(self, probe: str, phase: int) -> dict[str, Tensor]:
        """Return the tensors of one probe in one phase.

        Raises:
            RunError: If the file is missing, corrupt, or of another run or record.
        """
        path = self.store.tensor_path(probe, phase)
        if not path.is_file():
            raise RunError(f"{path}, the tensors of a record, is missing. Restore it.")
        tensors, _ = load_checkpoint(path, run=self.info["id"], probe=probe, phase=phase)
        return tensors

    def checks(self) -> list[StoredCheck]:
        """Return the checks of all probes and phases, in the order in which they ran."""
        checks = []
        with reading(self.path / CHECKS):
            for line in self.directory.read(CHECKS):
                value = math.nan if line["value"] is None else line["value"]
                checks.append(StoredCheck(**line | {"value": value}))
        return checks

    def notes(self) -> list[dict[str, Any]]:
        """Return the probes that were switched off, why, and in which phase."""
        return self.directory.read(NOTES)

    def functions(self) -> list[str]:
        """Return the names of functions on events that returned a dict."""
        return sorted(path.stem for path in self.path.glob(f"{RETURNED}/*.jsonl"))

    def returned(self, function: str) -> list[dict[str, Any]]:
        """Return the dicts that a function on an event returned, with phase and event.

        Tensors are lists, non-finite numbers None. A second function of one name ends in `_2`.

        Raises:
            RunError: If no function of this name returned a dict.
        """
        if function not in self.functions():
            diagnostics = self.directory.read_info().get("diagnostics") or {}
            dropped = diagnostics.get(switched_off(function), {}).get("text")
            known = f"Available: {', '.join(self.functions()) or 'none'}."
            raise RunError(
                f"{self.path} has no dicts of a function {function!r}. {dropped or known}"
            )
        return self.directory.read(f"{RETURNED}/{function}.jsonl")

    def policy(
        self,
        which: str | SupportsIndex = "last",
        interventions: Mapping[str, InterventionFn] | None = None,
    ) -> TransformerWithValueHead:
        """Load the saved policy "last", "best", or that after a number of learning phases.

        Args:
            interventions: see `load_policy`.

        Raises:
            RunError: If the checkpoint does not exist.
            ConfigError: If an intervention of the run is missing.
        """
        return load_policy(self.path, which, interventions=interventions)[0]


def select_phase(
    lines: Sequence[Mapping[str, Any]], phase: int, what: str, run: Run
) -> list[Mapping[str, Any]]:
    """Return the lines of one phase, -1 for the last; raise RunError without any."""
    phase = lines[-1]["phase"] if lines and phase == -1 else phase
    found = [line for line in lines if line["phase"] == phase]
    if not found:
        phases = ", ".join(dict.fromkeys(str(line["phase"]) for line in lines))
        raise RunError(f"phase={phase!r} has no {what} in {run.path}, only {phases or 'none'}.")
    return found
