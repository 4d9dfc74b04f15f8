"""The commands of the command line; each function returns the exit status."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.device import pick_device
from rlhf_lab.models.fast import tune_for
from rlhf_lab.probes import Run, attach_default_suite, had_default_suite
from rlhf_lab.rewards import load_reward, score_texts
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts
from rlhf_lab.training import RLHFTrainer, RunDir
from rlhf_lab.training.restore import load_policy
from rlhf_lab.views import RunView, sample_table, write_report

DEFAULT_GEN_LEN = 26
INTERRUPTED = 130


class PatientConsole(Console):
    """A console whose reader may go away (as in `| head -1`) without ending the run."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train(args: RLHFArgs, out: Path | None, probes: bool) -> int:
    """Train from the start, watched by the default probes if `probes` is set."""
    console = PatientConsole()
    console.print(f"loading {args.base_model} and its reward", highlight=False, soft_wrap=True)
    trainer = RLHFTrainer(args, out=out)
    tune_for(trainer.policy, args.tune_cpu)
    if probes:
        attach_default_suite(trainer)
    return _run(trainer, console)


def resume(directory: Path) -> int:
    """Go on with a run, under the default probes if it had them."""
    console = PatientConsole()
    trainer = RLHFTrainer.resume(directory)
    tune_for(trainer.policy, trainer.args.tune_cpu)
    if trainer.phase >= trainer.args.total_phases and trainer.run.read_info().get("final"):
        message = f"{directory} is finished; nothing is left to do."
        console.print(message, highlight=False, soft_wrap=True)
        return 0
    message = f"going on with {directory} at phase {trainer.phase}"
    console.print(message, highlight=False, soft_wrap=True)
    if had_default_suite(trainer.run):
        attach_default_suite(trainer)
    return _run(trainer, console)


def _run(trainer: RLHFTrainer, console: Console) -> int:
    """Train with a view; the first Ctrl-C finishes the phase and saves, a second stops at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        trainer.request_stop()
        console.print(
            "finishing this phase, then saving; Ctrl-C again stops at once", highlight=False
        )

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with RunView(trainer, console):
            trainer.train()
        is_done = trainer.phase >= trainer.args.total_phases
    except KeyboardInterrupt:
        is_done = False
    finally:
        signal.signal(signal.SIGINT, before)
    message = _figures(trainer.run) if is_done else _how_to_go_on(trainer)
    console.print(message, highlight=False, soft_wrap=True)
    return 0 if is_done else INTERRUPTED


def _figures(directory: RunDir) -> str:
    """What a finished run came to, and what its probes say of it, if it has any."""
    run, final = Run(directory.path), directory.read_info()["final"]
    figures = [f"{name} {value:.3f}" for name, value in final.items() if isinstance(value, float)]
    lines = [f"final, over {final['samples']} fresh samples: {', '.join(figures)}"]
    checks = run.checks()
    if checks:
        held = sum(check.ok for check in checks)
        lines.append(
            f"{len(run.probes())} probes recorded; {held} of {len(checks)} identity checks hold; "
            f"see python -m rlhf_lab report {run.path}"
        )
    return "\n".join([*lines, f"written to {run.path}"])


def _how_to_go_on(trainer: RLHFTrainer) -> str:
    path = trainer.run.path if trainer.run else "the run"
    return f"stopped at phase {trainer.phase}; go on with: python -m rlhf_lab resume {path}"


def write_samples(
    model: str,
    prompt: str | None,
    n: int,
    seed: int,
    checkpoint: str,
    device: str,
    **sampling: float | int | None,
) -> int:
    """Print samples: of a run's policy with their rewards, of any other model as they are."""
    if n < 1:
        raise ConfigError(f"n={n} is too small; ask for at least 1 sample.")
    place = pick_device(device)
    policy, args = _load_writer(model, checkpoint, place)
    if args is None:
        spec, prefix, prepend_bos = SamplingSpec(DEFAULT_GEN_LEN, stop_at_eos=True), "", True
    else:
        spec = SamplingSpec.from_args(args, policy.base_model.tokenizer)
        prefix, prepend_bos = args.prefix, args.prepend_bos
    spec = replace(spec, **{name: value for name, value in sampling.items() if value is not None})
    prefix = prefix if prompt is None else prompt
    tokenizer = policy.base_model.tokenizer
    prompts = tokenize_prompts(tokenizer, [prefix], prepend_bos) * n
    samples = sample(policy, prompts, spec, torch.Generator(place).manual_seed(seed))
    _print_samples(samples.texts(tokenizer), args, prefix, place)
    return 0


def _load_writer(
    model: str, checkpoint: str, place: torch.device
) -> tuple[TransformerWithValueHead, RLHFArgs | None]:
    """A run's policy with the run's arguments, or any other model with none."""
    if Path(model).is_dir() and not Path(model, "config.json").exists():
        return load_policy(model, int(checkpoint) if checkpoint.isdigit() else checkpoint, place)
    return TransformerWithValueHead(load_model(model, device=place)), None


def _print_samples(
    texts: list[str], args: RLHFArgs | None, prefix: str, place: torch.device
) -> None:
    """Texts as they are, or those of a run with their rewards."""
    console = Console()
    if args is not None:
        rewards = score_texts(load_reward(args, place), texts).tolist()
        console.print(sample_table(texts, rewards, prefix))
        return
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def score(
    texts: tuple[str, ...], reward_fn: str, reward_model: str, direction: str, device: str
) -> int:
    """Print a line per text: reward, tab, text."""
    lines = list(texts)
    if not lines and not sys.stdin.isatty():
        lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not lines:
        raise ConfigError(
            "there is no text to score; give texts as arguments or on standard input."
        )
    args = RLHFArgs(
        preset="reel", reward_fn=reward_fn, reward_model=reward_model, direction=direction
    )
    rewards = score_texts(load_reward(args, pick_device(device)), lines).tolist()
    for reward, line in zip(rewards, lines, strict=True):
        print(f"{reward:.4f}\t{line}")
    return 0


def report(directory: Path, out: Path | None) -> int:
    """Write the page about a run, and say where it is."""
    path = write_report(directory, out)
    Console().print(f"written: {path}", highlight=False, soft_wrap=True)
    return 0


def show_progress() -> int:
    """Print the table of exercises, and where it is kept."""
    from rlhf_lab.course import progress
    from rlhf_lab.course.progress_file import progress_path

    progress()
    Console().print(f"kept in {progress_path()}", style="dim", highlight=False, soft_wrap=True)
    return 0
