"""Training with several seeds and the same probes."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, check_range, reward_names
from rlhf_lab.errors import ConfigError
from rlhf_lab.files import expand_home, partial_file
from rlhf_lab.probes.probe import Probe
from rlhf_lab.probes.run import Run
from rlhf_lab.probes.spread import Runs, named_leaves
from rlhf_lab.probes.suite import Suite
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.overrides import describe_source
from rlhf_lab.training.resume import LOCATIONS
from rlhf_lab.training.run_dir import read_object

COMMON = "seeds.json"  # settings that all runs of a directory share
OF_ONE_RUN = ("policy", "reference", "optimizer", "scheduler", "kl_controller")  # have state
Probes = Sequence[Probe] | Suite | Callable[[RLHFTrainer], Suite]


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
    is_count = isinstance(seeds, int)
    seeds = range(args.seed, args.seed + seeds) if is_count else np.asarray(seeds).tolist()
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds={seeds} contains a seed twice, which is one run. Remove it.")
    for name in OF_ONE_RUN:
        if parts.get(name) is not None:
            raise ConfigError(f"{name} cannot be shared, because it has state. Use settings.")
    common = _common_settings(args, probes, parts)
    folder = expand_home(out or f"runs/{args.preset}-seeds-{_digest(common)}")
    _store_common_settings(folder, common)
    by_path = {folder / f"seed_{seed}": replace(args, seed=seed) for seed in seeds}
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
        values = lambda v: v.values() if isinstance(v, Mapping) else [v]
        is_plain = lambda v: all(isinstance(x, plain) for x in values(v))
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
        with partial_file(path) as partial:
            partial.write_text(json.dumps(common, indent=1), encoding="utf-8")
        return
    before, now = named_leaves(read_object(path)), named_leaves(common)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"out={str(folder)!r} has runs with {name}={before.get(name)!r:.60}, not "
                f"{now.get(name)!r:.60}. Choose another directory."
            )
