"""Interventions of a run: patching between two checkpoints, in one child process at a time."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rlhf_lab.errors import ConfigError, LabError
from rlhf_lab.probes import Run
from rlhf_lab.training.checkpoint import numbered_checkpoints, read_metadata

INTERVENTIONS = "interventions"  # folder of a run
SECONDS_PER_JOB = 120
N_TEXTS = 32
LONGEST_WORD, LONGEST_TEXT = 40, 100_000


@dataclass(frozen=True)
class PatchRequest:
    """A comparison of two checkpoints by patching.

    Args:
        base, tuned: checkpoints, as in `checkpoint_names`.
        up, down: the words of the logit difference.
        length: tokens of each text; all that every text has if None.
    """

    base: str
    tuned: str
    up: str
    down: str
    length: int | None = None

    @classmethod
    def parse(cls, fields: Any, checkpoints: list[str]) -> "PatchRequest":
        """Return a validated request.

        Raises:
            ConfigError: If a field is unknown, missing or has an invalid value.
        """
        names = ("base", "tuned", "up", "down")
        if not isinstance(fields, dict) or not set(names) <= fields.keys() <= {*names, "length"}:
            raise ConfigError("Set base, tuned, up, down and, if wanted, length only.")
        for name in names[:2]:
            if fields[name] not in checkpoints:
                raise ConfigError(f"{name} must be one of {', '.join(checkpoints)}.")
        for name in names[2:]:
            word = fields[name]
            is_word = isinstance(word, str) and word.isprintable() and not word.startswith("-")
            if not is_word or not 0 < len(word) <= LONGEST_WORD:
                raise ConfigError(f"{name} must be one word of at most {LONGEST_WORD} letters.")
        length = fields.get("length")
        if length is not None and (type(length) is not int or not 0 < length <= LONGEST_TEXT):
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
        """Return the arguments of `python -m rlhf_lab` that compute the result."""
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
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(result, dict) and {"request", "parts", "effects", "shift"} <= result.keys():
            found.append(result)
    return found


class Jobs:
    """The interventions of one run, of which one is computed at a time.

    Args:
        run: the run, whose folder gets the results.
        seconds: limit of a job.
    """

    def __init__(self, run: Run, seconds: float = SECONDS_PER_JOB) -> None:
        self.run, self.seconds = run, seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self.state: Mapping[str, Any] = {"status": "idle"}

    def post(self, fields: Any) -> Mapping[str, Any]:
        """Start a job, or cancel the running one with {"cancel": true}; return the state.

        Raises:
            ConfigError: If the request is invalid, or a job is running.
        """
        if fields == {"cancel": True}:
            with self._lock:
                if self._process is not None:
                    self.state = {"status": "canceled"}
                    self._process.kill()
            return self.state
        request = PatchRequest.parse(fields, checkpoint_names(self.run))
        with self._lock:
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
        """Wait for the child process, and store its result with the request."""
        process, began, errors = self._process, monotonic(), ""
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        try:
            _, errors = process.communicate(timeout=self.seconds)
            state = {"status": "failed", "error": errors.strip().splitlines()[-1:]}
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            state = {"status": "failed", "error": [f"The job took more than {self.seconds} s."]}
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
