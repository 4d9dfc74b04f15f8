"""Runs over several seeds with the same probes, and the mean and range of any number."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.progress import Progress
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, check_range, reward_names
from rlhf_lab.errors import ConfigError
from rlhf_lab.files import expand_home
from rlhf_lab.probes.probe import Probe
from rlhf_lab.probes.run import Run
from rlhf_lab.probes.suite import Suite
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.overrides import describe_source
from rlhf_lab.training.resume import LOCATIONS
from rlhf_lab.training.run_dir import read_object, replacing

COMMON = "seeds.json"  # settings that all runs of a directory share
OF_ONE_RUN = ("policy", "reference", "optimizer", "scheduler", "kl_controller")  # have state
SuiteMaker = Callable[[RLHFTrainer], Suite]
Probes = Sequence[Probe] | Suite | SuiteMaker


@dataclasses.dataclass(frozen=True)
class Spread:
    """A number over several seeds.

    Args:
        values: one per seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.values)

    @property
    def low(self) -> float:
        """Minimum over the seeds; nan if a value is."""
        return float(np.min(self.values))

    @property
    def high(self) -> float:
        """Maximum over the seeds; nan if a value is."""
        return float(np.max(self.values))

    def __str__(self) -> str:
        n = len(self.values)
        seeds = f"{n} seed{'s' * (n > 1)}"
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g}, {seeds})"


class Runs(list[Run]):
    """Finished runs that differ only in their seed, in the order of their seeds."""

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [run.args.seed for run in self]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Runs(found) if isinstance(index, slice) else found

    def over(self, number: Callable[[Run], float]) -> Spread:
        """Return any number of a run, over the seeds."""
        return Spread(tuple(float(number(run)) for run in self))

    def metrics(self, phase: int = -1) -> dict[str, Spread]:
        """Return every metric of a phase by name, over the seeds; phase -1 is the last."""
        return _spreads([_read_phase(run.metrics(), phase, "metrics", run) for run in self])

    def final(self) -> dict[str, Spread]:
        """Return every metric of fresh samples of the trained policies by name, over the seeds."""
        return _spreads([run.info["final"] for run in self])

    def record(self, probe: str, phase: int = -1) -> dict[str, Spread]:
        """Return every number that a probe recorded in a phase, over the seeds.

        Numbers in lists and objects are named by path, such as `accuracy.2`; phase -1 is the last.

        Raises:
            RunError: If the probe has no records.
            ConfigError: If it has none of that phase.
        """
        return _spreads([_read_phase(run.records(probe), phase, probe, run) for run in self])


def runs(
    args: RLHFArgs,
    probes: Probes = (),
    seeds: int | Sequence[int] | np.ndarray = 5,
    out: str | Path | None = None,
    show_progress: bool = True,
    **parts: Any,
) -> Runs:
    """Train with several seeds and the same probes, or read or resume these runs.

    Args:
        args: the settings.
        seeds: the seeds, or how many; these count from `args.seed`.
        probes: probes, a suite with its eval text, or a function that makes one for a trainer,
            such as `default_suite`.
        out: directory of these runs only; when None, one below `runs`, named by a digest of the
            arguments, so the same call finds it again.
        show_progress: show a bar with the phases of each seed.
        parts: components of the trainer without state, such as `reward_fn`.

    Raises:
        ConfigError: If seeds is below 1, a part belongs to one run, or the directory holds runs of
            other settings, probes or parts.
    """
    check_range(AT_LEAST_1, seeds=seeds if isinstance(seeds, int) else len(seeds))
    first, is_count = args.seed, isinstance(seeds, int)
    seeds = range(first, first + seeds) if is_count else np.asarray(seeds).tolist()
    for name in OF_ONE_RUN:
        if parts.get(name) is not None:
            raise ConfigError(
                f"{name} cannot be shared by several runs, because it has state. Use settings."
            )
    common = _common_settings(args, probes, parts)
    folder = expand_home(out or f"runs/{args.preset}-seeds-{_digest(common)}")
    _store_common_settings(folder, common)
    by_path = {folder / f"seed_{seed}": dataclasses.replace(args, seed=seed) for seed in seeds}
    is_finished = lambda path: path.exists() and read_object(path).get("status") == "finished"
    missing = {p: each for p, each in by_path.items() if not is_finished(p / "run.json")}
    with Progress(disable=not show_progress or not missing) as progress:
        for path, each in missing.items():
            is_new = not (path / "run.json").exists()
            resume = RLHFTrainer.resume
            trainer = RLHFTrainer(each, out=path, **parts) if is_new else resume(path, **parts)
            made = probes(trainer) if callable(probes) else probes
            (made if isinstance(made, Suite) else Suite(*made)).attach(trainer)
            phases = args.total_phases - trainer.phase
            for _ in progress.track(trainer, total=phases, description=f"seed {each.seed}"):
                pass
    return Runs([Run(path) for path in by_path])


def _common_settings(args: RLHFArgs, probes: Probes, parts: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in args.to_dict().items() if name != "seed"}
    suite = probes if isinstance(probes, Suite) or callable(probes) else Suite(*probes)
    described: dict[str, Any] = {"probes": getattr(suite, "__qualname__", type(suite).__name__)}
    if isinstance(suite, Suite):
        plain = str | int | float | bool | tuple | None
        is_plain = lambda v: all(
            isinstance(x, plain) for x in (v.values() if isinstance(v, Mapping) else [v])
        )
        options = lambda probe: {k: v for k, v in vars(probe).items() if is_plain(v)}
        described["probes"] = [probe.settings() | options(probe) for probe in suite.probes]
        custom = [type(p) for p in suite.probes if not type(p).__module__.startswith("rlhf_lab.")]
        described["sources"] = describe_source(custom)
        described["record"] = suite.record
        for name in ("eval_tokens", "eval_text", "eval_mask", "labels"):
            described[name] = _digest(getattr(suite, name))
    sources = {name: describe_source(part) for name, part in parts.items() if part is not None}
    sources |= _file_digests(args)
    return json.loads(json.dumps({"args": settings, "suite": described, "parts": sources}))


def _file_digests(args: RLHFArgs) -> dict[str, str]:
    """Return a digest of each local file of weights or data that a setting names."""
    names = [getattr(args, name) for name in LOCATIONS]
    names += [x.partition(":")[2] for x in reward_names(args.reward_fn) if "json_schema:" in x]
    paths = [expand_home(name) for name in names if name]
    files = [x for path in paths for x in (path, *path.glob("*.safetensors")) if x.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def _digest(value: Any) -> str | None:
    if value is None:
        return None
    value = value.tolist() if isinstance(value, Tensor) else value
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _store_common_settings(folder: Path, common: dict[str, Any]) -> None:
    path = folder / COMMON
    if not path.exists():
        if (folder / "run.json").exists():
            raise ConfigError(f"out={str(folder)!r} holds a run. Choose a directory for several.")
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(common, indent=1), encoding="utf-8")
        return
    before, now = _leaves(read_object(path)), _leaves(common)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"out={str(folder)!r} has runs with {name}={before.get(name)!r:.60}, not "
                f"{now.get(name)!r:.60}. Choose another directory."
            )


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        return {prefix: value}
    named = ((f"{prefix}.{name}" if prefix else str(name), entry) for name, entry in entries)
    return {leaf: v for name, entry in named for leaf, v in _leaves(entry, name).items()}


def _spreads(records: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    leaves = [_leaves(record) for record in records]
    spreads = {}
    for name in leaves[0]:
        values = [each.get(name, "missing") for each in leaves]
        numbers = [math.nan if value is None else value for value in values]
        if any(value is not None for value in values) and {*map(type, numbers)} <= {int, float}:
            spreads[name] = Spread(tuple(map(float, numbers)))
    return spreads


def _read_phase(
    lines: Sequence[Mapping[str, Any]], phase: int, what: str, run: Run
) -> Mapping[str, Any]:
    of_phase = [line for line in lines if phase == -1 or line["phase"] == phase]
    if not of_phase:
        phases = ", ".join(dict.fromkeys(str(line["phase"]) for line in lines))
        raise ConfigError(f"phase={phase} has no {what} in {run.path}, only {phases or 'none'}.")
    return of_phase[-1]
