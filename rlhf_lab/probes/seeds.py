"""Runs over several seeds with the same probes: the mean and range of any number, in one call."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, check_range
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.probe import Probe
from rlhf_lab.probes.run import Run
from rlhf_lab.probes.suite import Suite
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.run_dir import read_object, replacing

COMMON = "seeds.json"  # settings that all runs of a directory share
OF_ONE_RUN = ("policy", "reference", "optimizer", "scheduler", "kl_controller")
"""Parts that a run changes or that belong to its policy: each seed needs its own."""

SuiteMaker = Callable[[RLHFTrainer], Suite]


@dataclasses.dataclass(frozen=True)
class Spread:
    """A number over several seeds.

    Args:
        values: one per seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.values)

    @property
    def low(self) -> float:
        """The lowest of the seeds; nan if one of them is."""
        return math.nan if any(map(math.isnan, self.values)) else min(self.values)

    @property
    def high(self) -> float:
        """The highest of the seeds; nan if one of them is."""
        return math.nan if any(map(math.isnan, self.values)) else max(self.values)

    def __str__(self) -> str:
        n = len(self.values)
        seeds = f"{n} seed{'s' * (n > 1)}"
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g}, {seeds})"


class Runs(Sequence[Run]):
    """Finished runs that differ in their seed alone, in the order of their seeds."""

    def __init__(self, found: Sequence[Run]) -> None:
        self._runs = list(found)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: Any) -> Any:
        return self._runs[index]

    @property
    def seeds(self) -> list[int]:
        """The seed of each."""
        return [run.args.seed for run in self]

    def over(self, number: Callable[[Run], float]) -> Spread:
        """Any number of a run, over the seeds."""
        return Spread(tuple(float(number(run)) for run in self))

    def metrics(self, phase: int = -1) -> dict[str, Spread]:
        """Every metric of a phase by its name, over the seeds.

        Args:
            phase: the number of learning phases behind it; the last one when -1.
        """
        return _spreads([_of_phase(run.metrics(), phase, "metrics", run) for run in self])

    def final(self) -> dict[str, Spread]:
        """What fresh samples of the trained policies measure, by name, over the seeds."""
        return _spreads([run.info["final"] for run in self])

    def record(self, probe: str, phase: int = -1) -> dict[str, Spread]:
        """Return every number that a probe recorded in a phase, over the seeds.

        Numbers in lists and objects are named by path, such as `accuracy.2`.

        Args:
            phase: see `metrics`.

        Raises:
            RunError: If the probe has no records.
            ConfigError: If it has none of that phase.
        """
        return _spreads([_of_phase(run.records(probe), phase, probe, run) for run in self])


def runs(
    args: RLHFArgs,
    probes: Sequence[Probe] | Suite | SuiteMaker = (),
    seeds: int = 5,
    out: str | Path | None = None,
    show_progress: bool = True,
    **parts: Any,
) -> Runs:
    """Train with several seeds and the same probes, or read or resume these runs.

    Args:
        args: the settings; seeds count from `args.seed`.
        probes: as for a `Suite`; a suite with its eval text; or a function that makes one for a
            trainer, such as `default_suite`.
        out: directory of these runs only; when None, one below `runs`, named by a digest of the
            arguments, so the same call finds it again.
        show_progress: show a bar with the phases of all seeds.
        parts: components of the trainer without state, such as `reward_fn`.

    Raises:
        ConfigError: If seeds is below 1, a part belongs to one run, or the directory holds runs of
            other settings, probes or parts.
    """
    check_range(AT_LEAST_1, seeds=seeds)
    for name in OF_ONE_RUN:
        if parts.get(name) is not None:
            raise ConfigError(
                f"{name} cannot be shared by the runs of several seeds, each of which would go on "
                "from the one before; leave it out, and say what it is by settings."
            )
    asked = _asked(args, probes, parts)
    place = Path("runs", f"{args.preset}-seeds-{_digest(asked)}") if out is None else Path(out)
    _note(place, asked)
    wanted = [dataclasses.replace(args, seed=args.seed + i) for i in range(seeds)]
    places = [place / f"seed_{each.seed}" for each in wanted]
    missing = [(each, at) for each, at in zip(wanted, places, strict=True) if not _is_done(at)]
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=not show_progress or not missing) as progress:
        task = progress.add_task("", total=len(missing) * args.total_phases)
        for number, (each, at) in enumerate(missing, 1):
            progress.update(task, description=f"seed {each.seed} ({number} of {len(missing)})")
            trainer = _trainer(each, at, parts)
            progress.advance(task, trainer.phase)
            _suite(probes, trainer).attach(trainer)
            for _ in trainer:
                progress.advance(task)
    return Runs([Run(at) for at in places])


def _trainer(args: RLHFArgs, place: Path, parts: Mapping[str, Any]) -> RLHFTrainer:
    if (place / "run.json").exists():
        return RLHFTrainer.resume(place, **parts)
    return RLHFTrainer(args, out=place, **parts)


def _suite(probes: Sequence[Probe] | Suite | SuiteMaker, trainer: RLHFTrainer) -> Suite:
    if isinstance(probes, Suite):
        return probes
    return probes(trainer) if callable(probes) else Suite(*probes)


def _is_done(place: Path) -> bool:
    path = place / "run.json"
    return path.exists() and read_object(path).get("status") == "finished"


def _asked(
    args: RLHFArgs, probes: Sequence[Probe] | Suite | SuiteMaker, parts: Mapping[str, Any]
) -> dict[str, Any]:
    settings = {name: value for name, value in args.to_dict().items() if name != "seed"}
    suite = probes if isinstance(probes, Suite) or callable(probes) else Suite(*probes)
    if isinstance(suite, Suite):
        shown = {
            "probes": [probe.settings() | _plain(vars(probe)) for probe in suite.probes],
            "eval_tokens": _digest(suite.eval_tokens),
            "eval_text": _digest(suite.eval_text),
            "eval_mask": _digest(suite.eval_mask),
            "labels": _digest(suite.labels),
            "record": suite.record,
        }
    else:
        shown = {"probes": getattr(suite, "__qualname__", type(suite).__name__)}
    names = sorted(name for name, part in parts.items() if part is not None)
    return json.loads(json.dumps({"args": settings, "suite": shown, "parts": names}))


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    kinds = str | int | float | bool | tuple | None
    return {name: value for name, value in found.items() if isinstance(value, kinds)}


def _digest(found: Any) -> str | None:
    if found is None:
        return None
    if isinstance(found, Tensor):
        found = found.tolist()
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def _note(place: Path, asked: dict[str, Any]) -> None:
    path = place / COMMON
    if not path.exists():
        if (place / "run.json").exists():
            raise ConfigError(f"out={str(place)!r} holds a run; give a directory for several.")
        place.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(asked, indent=1), encoding="utf-8")
        return
    there, now = _leaves(read_object(path)), _leaves(asked)
    for name in sorted(there.keys() | now.keys()):
        if there.get(name) != now.get(name):
            raise ConfigError(
                f"out={str(place)!r} holds runs with {name}={there.get(name)!r:.60}, and "
                f"{now.get(name)!r:.60} is asked for; choose another directory."
            )


def _leaves(found: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(found, Mapping):
        parts = found.items()
    elif isinstance(found, list | tuple):
        parts = enumerate(found)
    else:
        return {prefix: found}
    named = ((f"{prefix}.{name}" if prefix else str(name), value) for name, value in parts)
    return {leaf: v for name, value in named for leaf, v in _leaves(value, name).items()}


def _spreads(found: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    leaves = [_leaves(one) for one in found]
    names = [name for name in leaves[0] if all(name in one for one in leaves)]
    numbers = {name: [one[name] for one in leaves] for name in names}
    return {
        name: Spread(tuple(math.nan if v is None else float(v) for v in values))
        for name, values in numbers.items()
        if all(v is None or type(v) in (int, float) for v in values)
        and values != [None] * len(found)
    }


def _of_phase(
    lines: Sequence[Mapping[str, Any]], phase: int, what: str, run: Run
) -> Mapping[str, Any]:
    """The line of a phase, or the last one."""
    found = [line for line in lines if phase == -1 or line["phase"] == phase]
    if not found:
        there = ", ".join(dict.fromkeys(str(line["phase"]) for line in lines))
        raise ConfigError(f"phase={phase} has no {what} in {run.path}, only {there or 'none'}.")
    return found[-1]
