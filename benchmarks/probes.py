"""Cost of probes: CPU seconds of a record of each opt-in probe, next to those of a phase.

`python -m benchmarks.probes measure` times the probes, `python -m benchmarks.probes write-docs`
writes the table of docs/probes_causal.md from the stored records.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import process_time
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks import machine
from benchmarks.ours import bench_args
from benchmarks.records import Record, read_records, store_record, write_whole
from benchmarks.sheet import Sheet
from benchmarks.work import ShapeName, Work, write_model
from rlhf_lab import probes as library
from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.probes import Attachment, attach
from rlhf_lab.training import Event, RLHFTrainer

RESULTS = Path(__file__).parent / "results" / "probes.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "probes_causal.md"
BEGIN, END = "<!-- costs of probes: begin -->", "<!-- costs of probes: end -->"
KEYS = frozenset({"machine", "work", "command", "probes", "plain", "left_out"})
WORDS = {"word": "w1", "other": "w2"}
EVAL_TEXTS, NOISE = 32, 1e-4
# the probes that are timed, and two words that their defaults lack on random weights
TIMED: MappingProxyType[str, Mapping[str, Any]] = MappingProxyType(
    {
        "AttentionDrift": WORDS,
        "StepInfluence": WORDS,
        "FrozenProbe": {},
        "HackWatch": {},
        "NeuronRank": WORDS,
    }
)


class Timed(NamedTuple):
    """A run whose phases are timed, and CPU seconds of its probes in the current phase."""

    reports: Iterator[Any]
    attachments: dict[str, Attachment]
    spent: Counter

    def turn(self) -> tuple[float, dict[str, float]]:
        """Run the next phase; returns CPU seconds without probes, and of each."""
        self.spent.clear()
        start = process_time()
        next(self.reports, None)
        return process_time() - start - self.spent.total(), dict(self.spent)


def measure(
    shape: ShapeName = "tiny",
    probes: tuple[str, ...] = tuple(TIMED),
    turns: int = 3,
    out: Path | None = None,
) -> int:
    """Time a record of each probe with its checks, and the phase of a run without probes.

    One process with one thread; CPU seconds, which other programs hardly change. All probes are
    attached to one run, and called in every phase.

    Args:
        shape: the model, as in `python -m benchmarks`.
        probes: names of classes of probes.
        turns: phases of each run; the policy starts slightly off the reference.
        out: store the record in this .jsonl file, instead of an earlier one of the same command.
    """
    for name in probes:
        if name not in TIMED:
            raise ConfigError(f"Unknown probes={name!r}. Choose from: {', '.join(TIMED)}.")
    disable_progress_bar()
    torch.set_num_threads(1)
    work = Work(shape=shape, device="cpu", threads=1)
    command = f"python -m benchmarks.probes measure --shape {shape} --turns {turns}"
    command += f" --probes {' '.join(probes)}" * (probes != tuple(TIMED))
    result: dict[str, Any] = {"command": command, "work": work.to_dict()}
    result |= {"machine": machine.describe(torch.device("cpu")), "eval_texts": EVAL_TEXTS}
    result |= {"probes": {}, "plain": [], "left_out": {}}
    with tempfile.TemporaryDirectory() as directory:
        write_model(work.size, Path(directory, "model"))
        runs = [
            load_timed(group, work, turns, Path(directory), result["left_out"])
            for group in ([], probes)
        ]
        for _ in range(turns):
            for run in runs:
                _store_turn(run, result)
    for run in runs:
        for name, attachment in run.attachments.items():
            if attachment.notes:
                result["left_out"][name] = f"{name} is left out: {'; '.join(attachment.notes)}"
                result["probes"].pop(name, None)
    print_line(costs_table([result]).markdown())
    for reason in result["left_out"].values():
        print_line(reason)
    if out is not None:
        store_record(out, result, lambda other: other["command"] == result["command"])
    return 0


def _store_turn(run: Timed, result: dict[str, Any]) -> None:
    phase, spent = run.turn()
    if not run.attachments:
        result["plain"].append(phase)
    for name in run.attachments:
        empty = {"every": getattr(library, name).every, "calls": [], "rest": []}
        found = result["probes"].setdefault(name, empty)
        found["calls"].append(spent[name])
        found["rest"].append(phase)


def load_timed(
    names: Sequence[str], work: Work, phases: int, directory: Path, left_out: dict[str, str]
) -> Timed:
    """Load a run with these probes, each called in every phase, from a model in the directory."""
    setup, out = work.setup(directory / "model"), directory / "-".join(["run", *names[:1]])
    changes = {"total_phases": phases, "warmup_steps": 0, "save_every": phases}
    trainer = RLHFTrainer(bench_args(setup, **changes), out=out)
    tune_for(trainer.policy, trainer.args.cpu_tuning)
    generator = torch.Generator().manual_seed(setup["seed"])
    seq = setup["prefix_len"] + setup["gen_len"]
    tokens = torch.randint(1, work.size.d_vocab, (EVAL_TEXTS, seq), generator=generator)
    tokens[:, 0] = 0
    options = {"eval_tokens": tokens, "labels": torch.rand(EVAL_TEXTS, generator=generator) < 0.5}
    with torch.no_grad():  # some probes do less work if the policy is the reference
        for x in trainer.policy.parameters():
            if x.requires_grad:
                x += NOISE * torch.randn(x.shape, generator=generator)
    spent, attachments = Counter(), {}
    for name in names:
        try:
            probe = getattr(library, name)(**TIMED[name], every=1)
            attachments[name] = _attach_timed(trainer, name, probe, spent, options)
        except ConfigError as error:
            left_out[name] = f"{name} is left out: {error}"
    return Timed(iter(trainer), attachments, spent)


def _attach_timed(
    trainer: RLHFTrainer, name: str, probe: Any, spent: Counter, options: dict[str, Any]
) -> Attachment:
    """Attach a probe between two callbacks that count the CPU seconds between them."""
    for event in get_args(Event):
        trainer.on(event)(lambda ctx: spent.subtract({name: process_time()}))
    attached = attach(trainer, probe, **options)
    for event in get_args(Event):
        trainer.on(event)(lambda ctx: spent.update({name: process_time()}))
    return attached


def costs_table(results: Sequence[Record]) -> Sheet:
    """Show the fraction of CPU seconds that each probe adds to a run, on each shape."""
    added: dict[str, list[str]] = {}
    every: dict[str, str] = {}
    for result in results:
        for name in result["probes"]:
            every[name], cost = _cost(result, name)
            added.setdefault(name, []).append(f"{cost} ({result['work']['shape']})")
    body = [[f"`{name}`", every[name], ", ".join(costs)] for name, costs in added.items()]
    return Sheet(["probe", "every", "added to a run"], body)


def _cost(result: Record, name: str) -> tuple[str, str]:
    one = result["probes"][name]
    phases = median(one["calls"]) / median(_plain_phases(result, name))
    return str(one["every"]), f"{phases / one['every']:.1%}"


def _plain_phases(result: Record, name: str) -> list[float]:
    return result["plain"] or result["probes"][name]["rest"]


def costs_page(page: str, results: Sequence[Record]) -> str:
    """Replace the table between the two marks of the page."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    table = costs_table(results).markdown()
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def write_docs(results: Path = RESULTS, page: Path = PAGE) -> int:
    """Write the table of costs into the page."""
    write_whole(page, costs_page(page.read_text(encoding="utf-8"), read_records(results, KEYS)))
    return 0


if __name__ == "__main__":
    sys.exit(
        run_program({"measure": measure, "write-docs": write_docs}, "python -m benchmarks.probes")
    )
