"""Probe overhead: processor seconds of a record of each opt-in probe, beside those of a phase.

`python -m benchmarks.probes measure` times each probe alone, `python -m benchmarks.probes
write-docs` writes the table of docs/probes_causal.md from the stored records.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks import machine
from benchmarks.ours import bench_args
from benchmarks.probe_costs import BEGIN, END, ON_ADAPTERS, costs_page, probe_costs
from benchmarks.records import put_record, read_records, write_whole
from benchmarks.work import ShapeName, Work, write_model
from rlhf_lab import probes as library
from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.probes import Attachment, Budget, Probe, attach
from rlhf_lab.training import Context, Event, RLHFTrainer

RESULTS = Path(__file__).parent / "results" / "probes.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "probes_causal.md"
KEYS = frozenset({"machine", "work", "command", "probes", "plain", "left_out"})
WORDS = {"word": "w1", "other": "w2"}
LORA_RANK, NOISE = 8, 1e-4
TIMED: MappingProxyType[str, Mapping[str, Any]] = MappingProxyType(
    {
        "AttentionDrift": WORDS,
        "ComponentTransplant": {},
        "StepInfluence": WORDS,
        "FrozenProbe": {},
        "ValueAttribution": {},
        "GradTerms": {},
        "KLAttribution": {},
        "Fisher": {},
        "HackWatch": {},
        "NeuronRank": WORDS,
        "LensDivergence": {},
        "OffPrincipal": {},
        "AdapterReading": {},
    }
)
"""The probes that are timed, and what their defaults lack on random weights: two words."""


class Timed(NamedTuple):
    """One run whose phases are timed, and the probes on it.

    Args:
        taken: processor seconds that each probe's attachment took since they were last read.
    """

    trainer: RLHFTrainer
    reports: Iterator[Any]
    attachments: dict[str, Attachment]
    taken: Counter

    def turn(self) -> tuple[float, dict[str, float]]:
        """Processor seconds of the next phase, or of the end: without probes, and of each."""
        self.taken.clear()
        began = process_time()
        next(self.reports, None)
        return process_time() - began - self.taken.total(), dict(self.taken)


def measure(
    shape: ShapeName = "tiny",
    probes: tuple[str, ...] = tuple(TIMED),
    turns: int = 3,
    warmups: int = 1,
    together: bool = False,
    eval_texts: int = 32,
    batch_size: int = 32,
    out: Path | None = None,
) -> int:
    """Time a record of each probe with its checks, and the phase that it belongs to.

    One process with one thread; processor seconds, which other programs change little.

    Args:
        shape: The model, as `python -m benchmarks` has it.
        probes: Names of classes of probes.
        turns: Phases that count; all runs take turns, phase by phase.
        warmups: Phases before them that do not; with none, policies begin off the reference.
        together: All probes on one run, where there is no memory or time for a run of each.
        eval_texts: Texts of as many tokens as the run's own.
        batch_size: Sequences per phase.
        out: Store the figures as a line of this .jsonl file, in place of the same command's.
    """
    for name in probes:
        if name not in TIMED:
            raise ConfigError(f"probes={name!r} is unknown; choose of {', '.join(TIMED)}.")
    for name, value, least in (("turns", turns, 1), ("warmups", warmups, 0)):
        if value < least:
            raise ConfigError(f"{name}={value} must be {least} or greater.")
    disable_progress_bar()
    torch.set_num_threads(1)
    work = Work(shape=shape, batch_size=batch_size, device="cpu", threads=1)
    words = ["python -m benchmarks.probes measure", f"--shape {shape}"]
    words += [f"--probes {' '.join(probes)}"] * (probes != tuple(TIMED))
    words += [f"--turns {turns} --warmups {warmups}"] * ((turns, warmups) != (3, 1))
    words += ["--together"] * together + [f"--eval-texts {eval_texts}"] * (eval_texts != 32)
    words += [f"--batch-size {batch_size}"] * (batch_size != 32)
    result: dict[str, Any] = {"command": " ".join(words), "work": work.to_dict()}
    result |= {"machine": machine.describe(torch.device("cpu")), "eval_texts": eval_texts}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        write_model(work.size, model)
        result |= {"probes": {}, "plain": [], "left_out": {}}
        runs = []
        for group in _groups(probes, together):
            run, left_out = load_timed(
                group, work, eval_texts, warmups + turns, not warmups, model.parent
            )
            runs.append(run)
            result["left_out"] |= left_out
        _take_turns(runs, warmups + turns, warmups, result)
    print_line(probe_costs([result]).markdown())
    for why in result["left_out"].values():
        print_line(why)
    if out is not None:
        put_record(out, result, lambda other: other["command"] == result["command"])
    return 0


def _groups(names: Sequence[str], together: bool) -> list[list[str]]:
    """The probes of each run; adapters have runs of their own, and the first run has no probe."""
    if not together:
        return [[], *([name] for name in names)]
    lora = [name for name in names if name in ON_ADAPTERS]
    return [group for group in ([n for n in names if n not in lora], lora) if group]


def load_timed(
    names: Sequence[str], work: Work, eval_texts: int, phases: int, moved: bool, place: Path
) -> tuple[Timed, dict[str, str]]:
    """A run with these probes, each called in every phase, and why some are left out.

    Args:
        moved: begin with a policy that is a little off the reference, since some probes do less
            work where they are one.
        place: the directory with the model, and for the run.
    """
    setup, out = work.setup(place / "model"), place / "-".join(["run", *names])
    changes = {"total_phases": phases, "warmup_steps": 0, "save_every": phases}
    if set(names) & ON_ADAPTERS:
        changes["lora_rank"] = LORA_RANK
    trainer = RLHFTrainer(bench_args(setup, **changes), out=out)
    tune_for(trainer.policy, trainer.args.cpu_tuning)
    generator = torch.Generator().manual_seed(setup["seed"])
    d_vocab = trainer.policy.base_model.cfg.d_vocab
    seq = setup["prefix_len"] + setup["gen_len"]
    tokens = torch.randint(1, d_vocab, (eval_texts, seq), generator=generator)
    tokens[:, 0] = 0
    labels = torch.rand(eval_texts, generator=generator) < 0.5
    options = {"eval_tokens": tokens, "labels": labels}
    if moved:
        with torch.no_grad():
            for x in trainer.policy.parameters():
                if x.requires_grad:
                    x += NOISE * torch.randn(x.shape, generator=generator)
    taken, attachments, left_out = Counter(), {}, {}
    for name in names:
        try:
            probe = getattr(library, name)(**TIMED[name], every=1)
            with_clock = _clocked(trainer, name, taken)
            attachments[name] = with_clock(probe, options)
        except ConfigError as error:
            left_out[name] = f"{name} is left out: {error}"
    return Timed(trainer, iter(trainer), attachments, taken), left_out


def _clocked(
    trainer: RLHFTrainer, name: str, taken: Counter
) -> Callable[[Probe, dict[str, Any]], Attachment]:
    """Attach a probe between two listeners that count the processor's seconds between them."""
    since = [0.0]

    def start(ctx: Context) -> None:
        since[0] = process_time()

    def stop(ctx: Context) -> None:
        taken[name] += process_time() - since[0]

    def attached(probe: Probe, options: dict[str, Any]) -> Attachment:
        for event in get_args(Event):
            trainer.on(event)(start)
        found = attach(trainer, probe, budget=Budget(mb=1e5, time_frac=1e5), **options)
        for event in get_args(Event):
            trainer.on(event)(stop)
        return found

    return attached


def _take_turns(runs: Sequence[Timed], total: int, warmups: int, result: dict[str, Any]) -> None:
    """Fill in the seconds of each probe and of the phases around it, phase by phase in turn."""
    found = result["probes"]
    for run in runs:
        for name in run.attachments:
            kind = getattr(library, name)
            at_end = kind.events == ("run_end",)
            found[name] = {"every": None if at_end else kind.every, "calls": [], "rest": []}
    for turn in range(total + 1):
        for run in runs:
            ends = [name for name in run.attachments if found[name]["every"] is None]
            if turn == total and not ends:  # others have had their records
                continue
            rest, taken = run.turn()
            spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in taken.items())
            print_line(f"turn {turn}: the phase {rest:.2f} s, {spent or 'no probe'}")
            if turn < warmups:
                continue
            if not run.attachments:
                result["plain"].append(rest)
            for name in run.attachments:
                if turn < total:
                    found[name]["rest"].append(rest)
                if (turn == total) == (name in ends):
                    found[name]["calls"].append(taken[name])
    for run in runs:
        for name, attachment in run.attachments.items():
            if attachment.notes:
                result["left_out"][name] = f"{name} is left out: {'; '.join(attachment.notes)}"
                found.pop(name)


def write_docs(results: Path = RESULTS, page: Path = PAGE) -> int:
    """Write the table of costs into the page, between its two marks."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ConfigError(f"page={page} has no place for the table; it goes between two comments.")
    write_whole(page, costs_page(text, read_records(results, KEYS)))
    return 0


if __name__ == "__main__":
    sys.exit(
        run_program({"measure": measure, "write-docs": write_docs}, "python -m benchmarks.probes")
    )
