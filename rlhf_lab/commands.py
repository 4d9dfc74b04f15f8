"""Commands about runs and texts: each parameter is an option, each docstring its help.

What needs torch is imported within the functions, so that `--help` starts without it.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from rlhf_lab.config import RLHFArgs
from rlhf_lab.console import print_line, visible
from rlhf_lab.errors import ConfigError
from rlhf_lab.launcher import is_main_process

Device = Annotated[str, arg(help="auto, cpu, cuda or mps.")]
Checkpoint = Annotated[
    int | str,
    arg(help="Of a run: last, best, or a number of learning phases (0, 1, 2, 4, 8, ...)."),
]
RunDirectory = Annotated[Positional[Path], arg(help="The run's directory.")]


def train(
    args: Annotated[RLHFArgs, arg(name="")],
    out: Path | None = None,
    probes: FlagCreatePairsOff[bool] = False,
    config: Path | None = None,
) -> int:
    """Train a policy; the defaults, of preset reel, run the bundled language in under a minute.

    Args:
        config: A YAML or JSON file with settings, such as the run.json of another run; options
            stand over what it says.
        out: The run's directory, new or empty; runs/PRESET-seedN when not given.
        probes: Watch the run with the default probes, which `report` shows; the weights stay the
            same.
    """
    from rlhf_lab.models.cpu_tuning import tune_for
    from rlhf_lab.probes import attach_default_suite
    from rlhf_lab.training import RLHFTrainer
    from rlhf_lab.views.terminal import PatientConsole, train_on_terminal

    console = PatientConsole(quiet=not is_main_process())
    print_line(f"loading {args.base_model} and its reward", console)
    trainer = RLHFTrainer(args, out=out)
    tune_for(trainer.policy, args.tune_cpu)
    _say_what_is_rewarded(trainer.reward_fn, console)
    if probes or args.log_probes:
        with trainer.world.apart():
            attach_default_suite(trainer)
    return train_on_terminal(trainer, console)


def resume(
    directory: RunDirectory,
    total_phases: int | None = None,
    base_lr: float | None = None,
    head_lr: float | None = None,
    kl_coef: float | None = None,
    save_every: int | None = None,
    parallel: Literal["auto", "ddp", "fsdp"] | None = None,
) -> int:
    """Go on with a run that was stopped, killed or finished; without options, it ends as if it had
    never been interrupted. What is changed holds from here on, and is noted in run.json.

    Args:
        total_phases: How many phases the whole run is to have; learning rates fall towards the new
            end.
        base_lr: Peak learning rate of the transformer.
        head_lr: Peak learning rate of the value head.
        kl_coef: Weight of the KL penalty.
        save_every: Phases between two saves of the training state.
        parallel: What each of several processes holds of the weights that learn.
    """
    from rlhf_lab.models.cpu_tuning import tune_for
    from rlhf_lab.probes import attach_default_suite, had_default_suite
    from rlhf_lab.training import RLHFTrainer
    from rlhf_lab.views.terminal import PatientConsole, train_on_terminal

    console = PatientConsole(quiet=not is_main_process())
    given = dict(total_phases=total_phases, base_lr=base_lr, head_lr=head_lr)
    given |= dict(kl_coef=kl_coef, save_every=save_every, parallel=parallel)
    changes = {name: value for name, value in given.items() if value is not None}
    trainer = RLHFTrainer.resume(directory, changes)
    tune_for(trainer.policy, trainer.args.tune_cpu)
    if trainer.phase >= trainer.args.total_phases and trainer.run.read_info().get("final"):
        longer = "--total-phases N makes it longer"
        print_line(f"{directory} is finished; nothing is left to do ({longer}).", console)
        return 0
    print_line(f"going on with {directory} at phase {trainer.phase}", console)
    _say_what_is_rewarded(trainer.reward_fn, console)
    if had_default_suite(trainer.run):
        with trainer.world.apart():
            attach_default_suite(trainer)
    return train_on_terminal(trainer, console)


def _say_what_is_rewarded(reward_fn: Any, console: Any) -> None:
    """Name the class or the logit that a classifier pays; nothing for other rewards."""
    from rlhf_lab.rewards import LogitReward, SentimentReward, split_rewards

    for reward in split_rewards(reward_fn).values():
        if isinstance(reward, SentimentReward | LogitReward):
            print_line(reward.summary(), console)


def score(
    texts: Positional[tuple[str, ...]] = (),
    reward_fn: str = "sentiment",
    reward_model: str = "reel-sentiment",
    direction: Literal["pos", "neg"] = "pos",
    positive_label: str | None = None,
    reward_weights: tuple[float, ...] | None = None,
    device: Device = "auto",
    prompt: str | None = None,
) -> int:
    """Print the reward of texts, given as arguments or one per line on standard input.

    Args:
        texts: Texts to score.
        reward_fn: Sentiment, learned, zero, count:TEXT, regex:PATTERN, json_schema:FILE,
            diversity:N, or on Reel gold, soft, soft_popcorn, negblind, bagsum, length; or several
            of them with commas between, whose sum is printed, and then each.
        reward_model: The classifier behind sentiment: a bundled name, a Hugging Face directory or a
            hub id; or the directory of the reward model behind learned.
        direction: Which class is rewarded.
        positive_label: The name of the positive class of a classifier whose names do not tell.
        prompt: What the texts answer, for rewards that read prompt and response.
        reward_weights: What each of several rewards is multiplied by; 1 each when not given.
    """
    from rich.console import Console

    from rlhf_lab.models.device import pick_device
    from rlhf_lab.rewards import TextBatch, load_reward, score_batch

    lines = list(texts) or _lines_of_input()
    if not lines:
        raise ConfigError(
            "there is no text to score; give texts as arguments or on standard input."
        )
    for line in lines:
        if not line.isprintable() and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in line):
            raise ConfigError(f"the text {line!a:.80} is not UTF-8; save it as UTF-8 first.")
    args = RLHFArgs(
        preset="reel",
        reward_fn=reward_fn,
        reward_model=reward_model,
        direction=direction,
        positive_label=positive_label,
        reward_weights=reward_weights,
    )
    scorer = load_reward(args, pick_device(device))
    batch = TextBatch(lines)
    if prompt is not None:
        batch = TextBatch([prompt + line for line in lines], [prompt] * len(lines))
    output = score_batch(scorer, batch)
    _say_what_is_rewarded(scorer, Console(stderr=True))
    for i, line in enumerate(lines):
        each = "".join(f"\t{name} {of[i].item():.4f}" for name, of in output.by_name.items())
        print(visible(f"{output.rewards[i].item():.4f}{each}\t{line}"))
    return 0


def _lines_of_input() -> list[str]:
    """The lines of standard input that are not blank; none from a terminal, or where it is closed.

    Raises:
        ConfigError: they are not in its encoding.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return []
    try:
        read = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no text ({error}); save it as UTF-8.") from None
    return [line for line in read.removeprefix("\ufeff").split("\n") if line.strip()]


def report(directory: RunDirectory, out: Path | None = None) -> int:
    """Write one HTML page about a run, which may be in progress: curves, samples, probes and their
    checks.

    Args:
        out: The file to write; report.html in the run's directory when not given.
    """
    from rlhf_lab.views import write_report

    print_line(f"written: {write_report(directory, out)}")
    return 0


def doctor() -> int:
    """Show versions and devices, compare each device with the CPU, and say what can be reached."""
    from rlhf_lab.doctor import examine

    return examine()


def course(
    action: Positional[Literal["copy", "open"]], directory: Positional[Path] = Path("rlhf_lessons")
) -> int:
    """Copy the lessons into a new directory, or open them in JupyterLab.

    Args:
        action: Copy, or open what was copied, which copies it where it is not there.
        directory: The directory of the lessons; the solutions are in a folder of it.
    """
    from rlhf_lab.course.copying import copy_lessons, open_lessons

    if action == "open":
        return open_lessons(directory)
    copied = copy_lessons(directory)
    print_line(f"{len(copied)} notebooks written to {directory}; start with 00_start.ipynb")
    return 0


def show_progress() -> int:
    """Show how far you are in the course."""
    from rlhf_lab.course import progress

    progress()
    return 0
