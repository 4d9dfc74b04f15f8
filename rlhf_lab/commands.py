"""What each command of the command line does; each function returns the exit status."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.device import pick_device
from rlhf_lab.models.fast import tune_for
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.organism.check import run_checks
from rlhf_lab.organism.train import rebuild
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
    """Train from the start, watched by the default probes if so asked."""
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
        said = f"{directory} is finished; nothing is left to do."
        console.print(said, highlight=False, soft_wrap=True)
        return 0
    said = f"going on with {directory} at phase {trainer.phase}"
    console.print(said, highlight=False, soft_wrap=True)
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
    said = _figures(trainer.run) if is_done else _how_to_go_on(trainer)
    console.print(said, highlight=False, soft_wrap=True)
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


def organism_train(out: Path) -> int:
    """Rebuild both bundled models, and say whether they are the ones that are shipped."""
    console = Console()
    disable_progress_bar()
    for name, trained in rebuild(out).items():
        console.print(f"{name}: {trained.directory}", highlight=False, soft_wrap=True)
        console.print(f"  {_compared_with_bundled(name, trained.directory)}", highlight=False)
    return 0


def _compared_with_bundled(name: str, directory: Path) -> str:
    new = load_file(directory / "model.safetensors")
    shipped = load_file(weights_dir(name) / "model.safetensors")
    gap = max((new[key] - shipped[key]).abs().max().item() for key in shipped)
    if gap == 0:
        return "bit for bit the shipped weights"
    return f"largest difference from the shipped weights {gap:.2g} (other CPUs round differently)"


def organism_check(reviews: int) -> int:
    """Print every check of the organism; status 1 when one fails."""
    table = Table("check", "value", "bound", "holds", box=None)
    disable_progress_bar()
    try:
        checks = run_checks(reviews)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for check in checks:
        table.add_row(
            escape(check.name), f"{check.value:.3g}", check.bound, "yes" if check.ok else "NO"
        )
    Console().print(table)
    return 0 if all(check.ok for check in checks) else 1


def course_build(lessons: tuple[str, ...], again: bool, root: Path) -> int:
    """Build the notebooks of some lessons, or of all, and say what changed."""
    builder = _builder()
    known = {master.stem: master for master in builder.masters(root)}
    for lesson in lessons:
        if lesson not in known:
            raise ConfigError(f"lesson {lesson!r} is unknown; choose from {', '.join(known)}.")
    console = Console()
    for lesson in lessons or known:
        built = builder.build_lesson(known[lesson], root, again)
        files = ", ".join(str(path.relative_to(root)) for path in built.changed)
        done = f"wrote {files}" if files else "nothing has changed"
        ran = "executed" if built.executed else "solution is up to date"
        console.print(f"{lesson}: {ran}; {done}", highlight=False, soft_wrap=True)
    return 0


def course_check(root: Path) -> int:
    """Print how each exercise and lesson does; status 1 when something is wrong with one."""
    _builder()
    from rlhf_lab.course.gate import lesson_problems, try_exercise
    from rlhf_lab.course.registry import all_exercises

    table = Table("exercise", "cases", "slips rejected and named", "generic rejected", box=None)
    tallies = [try_exercise(exercise) for exercise in all_exercises()]
    for tally in tallies:
        table.add_row(tally.name, str(tally.cases), str(tally.slips), str(tally.generic))
    slips, generic = (sum(getattr(t, kind) for t in tallies) for kind in ("slips", "generic"))
    table.add_row(f"{len(tallies)} in all", "", str(slips), str(generic), style="bold")
    problems = [f"{t.name}: {problem}" for t in tallies for problem in t.problems]
    problems += lesson_problems(root)
    console = Console()
    console.print(table)
    for problem in problems or ["every exercise and lesson is complete"]:
        console.print(problem, highlight=False, soft_wrap=True)
    return 1 if problems else 0


def _builder() -> ModuleType:
    """The notebook builder, which needs packages that only authors have."""
    try:
        from rlhf_lab.course import builder
    except ModuleNotFoundError as error:
        raise LoadError(
            f"{error.name} is not installed; install what authors need: pip install -e '.[dev]'."
        ) from error
    return builder


def show_progress() -> int:
    """Print the table of exercises, and where it is kept."""
    from rlhf_lab.course import progress
    from rlhf_lab.course.state import progress_path

    progress()
    Console().print(f"kept in {progress_path()}", style="dim", highlight=False, soft_wrap=True)
    return 0
