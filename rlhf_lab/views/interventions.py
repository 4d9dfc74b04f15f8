"""Interventions of a run: patching between two checkpoints, in one child process at a time."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rlhf_lab.errors import ConfigError, LabError
from rlhf_lab.organism.language import find_language
from rlhf_lab.probes import Run
from rlhf_lab.training.checkpoint import numbered_checkpoints, read_metadata
from rlhf_lab.views.pictures import Drawn, Html, paragraph
from rlhf_lab.views.plots import bars

INTERVENTIONS = "interventions"  # folder of a run
SECONDS_PER_JOB = 600  # about 6 on an idle machine; training goes first on a busy one
N_TEXTS = 32
LONGEST_WORD, LONGEST_TEXT = 40, 100_000
METHODS = ("own weights", "patched in", "patched out")


@dataclass(frozen=True)
class PatchRequest:
    """Two of `checkpoint_names`, both words of a logit difference, and the length of all texts."""

    base: str
    tuned: str
    up: str
    down: str
    length: int | None = None

    @classmethod
    def parse(cls, fields: Any, checkpoints: list[str]) -> "PatchRequest":
        """Return a request; raise ConfigError if a field is unknown, missing or invalid."""
        names = {"base", "tuned", "up", "down"}
        if not isinstance(fields, dict) or not names <= fields.keys() <= {*names, "length"}:
            raise ConfigError("Set base, tuned, up, down and, if wanted, length only.")
        for name, value in fields.items():
            if name in ("base", "tuned") and value not in checkpoints:
                raise ConfigError(f"{name} must be one of {', '.join(checkpoints)}.")
            is_word = isinstance(value, str) and value.isprintable() and not value.startswith("-")
            if name in ("up", "down") and not (is_word and 0 < len(value) <= LONGEST_WORD):
                raise ConfigError(f"{name} must be one word of at most {LONGEST_WORD} letters.")
            is_length = value is None or (type(value) is int and 0 < value <= LONGEST_TEXT)
            if name == "length" and not is_length:
                raise ConfigError("length must be a number of tokens.")
        return cls(**fields)

    def last_phase(self, run: Run) -> int | None:
        """Return the learning phases before the checkpoint "last", or None if it is not used."""
        if "last" not in (self.base, self.tuned):
            return None
        return read_metadata(run.directory.checkpoints / "last.safetensors")["phase"]

    def file_name(self, last_phase: int | None) -> str:
        """Return the name of the result, equal for equal requests of the same checkpoints."""
        key = json.dumps([asdict(self), last_phase])
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        return f"patch-{self.base}-to-{self.tuned}-{digest}.json"

    def command(self, run: Path, out: Path | None = None) -> list[str]:
        words = ["compare", str(run), str(run), "--base-checkpoint", self.base]
        words += ["--checkpoint", self.tuned, "--methods", "split", "patching"]
        words += ["--ranks", "0", "--alphas", "1"]
        words += ["--words", self.up, self.down, "--n-texts", str(N_TEXTS)]
        words += [] if self.length is None else ["--length", str(self.length)]
        return words if out is None else [*words, "--out", str(out)]


def checkpoint_names(run: Run) -> list[str]:
    """Return the checkpoints of a run: numbers of learning phases, then "last" if it exists."""
    folder = run.directory.checkpoints
    has_last = (folder / "last.safetensors").is_file()
    return [*map(str, numbered_checkpoints(folder)), *["last"] * has_last]


def stored_interventions(run: Run) -> list[dict[str, Any]]:
    """Return the results in the run's directory, without files that are not JSON objects."""
    found = []
    for path in sorted((run.path / INTERVENTIONS).glob("patch-*.json")):
        with suppress(OSError, ValueError):
            result = json.loads(path.read_text(encoding="utf-8"))
            names = {"request", "parts", "effects", "shift"}
            found += [result] if isinstance(result, dict) and names <= result.keys() else []
    return found


class Jobs:
    """The interventions of one run, of which one is computed at a time, within the seconds."""

    def __init__(self, run: Run, seconds: float = SECONDS_PER_JOB) -> None:
        self.run, self.seconds, self._lock = run, seconds, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.state: Mapping[str, Any] = {"status": "idle"}

    def post(self, fields: Any) -> Mapping[str, Any]:
        """Start a job, or cancel the running one with {"cancel": true}; return the state."""
        with self._lock:
            if fields == {"cancel": True}:
                if self._process is not None:
                    self.state = {"status": "canceled"}
                    self._process.kill()
                return self.state
            request = PatchRequest.parse(fields, checkpoint_names(self.run))
            if self._process is not None:
                raise ConfigError("A job is running. Wait, or cancel it.")
            last = request.last_phase(self.run)
            out = self.run.path / INTERVENTIONS / request.file_name(last)
            if out.is_file():
                self.state = {"status": "done", "file": out.name}
                return self.state
            out.parent.mkdir(exist_ok=True)
            draft = out.with_name(f".{out.name}")
            draft.unlink(missing_ok=True)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_lab", *request.command(self.run.path, draft)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                process_group=0,
            )
            self.state = {"status": "running"}
        threading.Thread(target=self._wait, args=(request, last, draft, out), daemon=True).start()
        return self.state

    def _wait(self, request: PatchRequest, last: int | None, draft: Path, out: Path) -> None:
        process, began = self._process, monotonic()
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        try:
            errors = process.communicate(timeout=self.seconds)[1].strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors = [f"The job took more than {self.seconds} s. Wait until training has ended."]
        state = {"status": "failed", "error": errors}
        try:
            if draft.is_file() and process.returncode in (0, 1):  # 1: a check failed
                if request.last_phase(self.run) != last:
                    raise ConfigError("The run has saved another 'last'. Choose a number.")
                result = json.loads(draft.read_text(encoding="utf-8"))
                result |= {"request": asdict(request), "last_phase": last}
                result |= {"seconds": round(monotonic() - began, 1)}
                draft.write_text(json.dumps(result) + "\n", encoding="utf-8")
                draft.replace(out)
                state = {"status": "done", "file": out.name}
        except (LabError, OSError, ValueError) as error:
            state = {"status": "failed", "error": [str(error)]}
        draft.unlink(missing_ok=True)
        with self._lock:
            self._process = None
            if self.state["status"] != "canceled":
                self.state = state


def interventions(run: Run) -> dict[str, Any]:
    """Return the stored interventions as pictures, the checkpoints, and a command for others."""
    parts = [part.fragment for result in stored_interventions(run) for part in _drawn(result)]
    names, command = checkpoint_names(run), []
    if names:
        command = PatchRequest(names[0], names[-1], *default_patch(run)).command(run.path)
    command = shlex.join(["python", "-m", "rlhf_lab", *command])
    return {"interventions": Html("".join(parts)), "checkpoints": names, "command": command}


def default_patch(run: Run) -> tuple[str, str, int | None]:
    """Return the words that moved most and the tokens before them, or the words of the language."""
    names = map(run.find_probe, ("WordsMoved", "TextHeatmap"))
    moved, texts = (run.records(name) if name else [] for name in names)
    moved = [record for record in moved if record["contrasts"] and texts]
    language = find_language(run.info["args"]["base_model"], run.info.get("working_directory", ""))
    if not moved:
        return *language.contrast, None
    largest, slots = max(moved[-1]["contrasts"], key=lambda x: x["fraction"]), moved[-1]["slots"]
    weights, slot = largest["weights"], largest["at"].partition(",")[0]
    words = max(weights, key=weights.get), min(weights, key=weights.get)
    length = texts[-1]["prefix_len"] + slots.index(slot)
    if len(slots) > 1 and length > language.contexts(1).shape[1]:  # texts of `compare` are shorter
        return *language.contrast, None
    return *words, length if len(slots) > 1 else None


def _drawn(result: Mapping[str, Any]) -> list[Drawn]:
    """Return failed checks, and one picture with own weights and patched effects on one axis."""
    request, effects = result["request"], result["effects"]
    columns = {x: list(zip(*effects[x], strict=True)) for x in METHODS if effects.get(x)}
    ends = {method: tuple(ab) for method, (_, *ab) in columns.items() if ab}
    where = f" after {request['length']} tokens" if request.get("length") else ""
    last = f"last (phase {result['last_phase']})" if "last_phase" in result else "last"
    base, tuned = (last if x == "last" else x for x in (request["base"], request["tuned"]))
    title = f"{' − '.join(map(str, result['words']))}{where}, checkpoint {base} to {tuned}"
    failed = [name for name, ok in result.get("checks", {}).items() if not ok]
    note = f"{summarize_intervention(result)} n = {result['n']} texts: {result.get('text', '')}."
    series = {method: column[0] for method, column in columns.items()}
    drawn = bars(result["parts"], series, title, "logits", ends, note)
    return [*(paragraph(f"Failed check: {name}", "failed") for name in failed), drawn]


def summarize_intervention(result: Mapping[str, Any]) -> str:
    effects, parts = result["effects"], result["parts"]
    if not all(map(effects.get, METHODS[:2])):
        return ""
    sizes = ([abs(row[0]) for row in effects[method]] for method in METHODS[:2])
    by_weights, patched = (x.index(max(x)) for x in sizes)
    same = "also the largest by own weights"
    if by_weights != patched:
        same = f"not the largest by own weights ({parts[by_weights]} is)"
    return (
        f"{parts[patched]} patched in brings {effects['patched in'][patched][0]:+.3f} of "
        f"{result['shift'][0]:+.3f} logits. It is {same}."
    )
