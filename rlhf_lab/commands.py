"""Commands about runs and texts: each parameter is an option, each docstring its help.

Modules that need torch are read from `rlhf_lab`, which imports them when they are used: `--help`
starts without them.
"""

import ast
import inspect
import re
import sys
from contextlib import nullcontext
from dataclasses import asdict, make_dataclass
from functools import cache
from itertools import pairwise
from os.path import isfile
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from tyro.conf import FlagCreatePairsOff, Positional, arg

import rlhf_lab
from rlhf_lab.config import RLHFArgs, algorithm_fields, fields
from rlhf_lab.console import print_line, visible
from rlhf_lab.errors import ConfigError
from rlhf_lab.parallel.launcher import process_rank

Device = Annotated[str, arg(help="auto, cpu, cuda or mps.")]
Checkpoint = Annotated[
    int | str,
    arg(help="Of a run: last, best, or a number of learning phases (0, 1, 2, 3, 5, 8, ...)."),
]
RunDirectory = Annotated[Positional[Path], arg(help="The run's directory.")]


@cache
def read_help() -> dict[str, str]:
    """Return the help of each setting: the string below its field, on one line."""
    sources = map(inspect.getsource, (algorithm_fields, fields))
    groups = [group for source in sources for group in ast.parse(source).body]
    return {
        field.target.id: " ".join(below.value.value.split())
        for group in groups
        if isinstance(group, ast.ClassDef)
        for field, below in pairwise(group.body)
        if isinstance(field, ast.AnnAssign)
    }


def make_settings(names: str, title: str, defaults: RLHFArgs | None = None) -> type:
    """Return a dataclass of some settings, with the types and the help of `RLHFArgs`.

    Without `defaults`, a setting that is not given is None, or False if it is a switch.
    """
    hints, texts, columns = get_type_hints(RLHFArgs), read_help(), []
    for name in names.split():
        hint, text = hints[name], texts[name]
        default = getattr(defaults, name, False if hint is bool else None)
        if defaults is None:
            hint = FlagCreatePairsOff[bool] if hint is bool else hint | None
            text = re.sub(r"; [\w ]+ when None\.$", ".", text)
        columns.append((name, Annotated[hint, arg(help=text)], default))
    return make_dataclass("Settings", columns, frozen=True, namespace={"__doc__": title})


def given(settings: Any) -> dict[str, Any]:
    """Return the settings that are given, of a dataclass without defaults."""
    return {k: v for k, v in asdict(settings).items() if v is not None and v is not False}


RESUMED = "total_phases base_lr head_lr kl_coef save_every parallel"
ResumeSettings = make_settings(RESUMED, "Settings of the run to change.")
SCORED = "reward_fn reward_model direction positive_label reward_weights"
ScoreSettings = make_settings(SCORED, "The reward.", RLHFArgs(preset="reel"))


def train(
    args: Annotated[RLHFArgs, arg(name="")],
    out: Path | None = None,
    probes: FlagCreatePairsOff[bool] = False,
    record: Literal["every", "milestones"] | tuple[int, ...] | None = None,
    config: Path | None = None,
) -> int:
    """Train a policy. The defaults, of preset reel, train on the bundled language in under a
    minute.

    Args:
        config: A YAML or JSON file with settings, such as the run.json of another run; options
            override it.
        out: The run's directory, without a run in it; runs/PRESET-seedN by default.
        probes: Attach the default probes, which `report` shows; the weights stay the same.
        record: Phases of records besides the end: every, or numbers; by default 0, 1, 2, 3, 5, ....
    """
    print_line(f"loading {args.base_model} and its reward", _console())
    trainer = rlhf_lab.RLHFTrainer(args, out=out)
    return _train(trainer, probes or bool(record) or args.log_probes, record)


def resume(directory: RunDirectory, settings: ResumeSettings) -> int:
    """Continue a run that was stopped, killed or finished. Without options it ends as if it had
    never been interrupted; changes are recorded in run.json. Learning rates decay toward the new
    end.
    """
    trainer = rlhf_lab.RLHFTrainer.resume(directory, given(settings))
    if trainer.phase >= trainer.args.total_phases and trainer.run.read_info().get("final"):
        print_line(f"{directory} is finished; --total-phases N makes it longer.", _console())
        return 0
    print_line(f"continuing {directory} at phase {trainer.phase}", _console())
    return _train(trainer, rlhf_lab.probes.had_default_suite(trainer.run))


def _train(trainer: Any, with_probes: bool, record: Any = None) -> int:
    """Train to the last phase, on a terminal with a live panel."""
    from rlhf_lab.models.cpu_tuning import tune_for
    from rlhf_lab.views.terminal import train_on_terminal

    console = _console()
    tune_for(trainer.policy, trainer.args.cpu_tuning)
    _print_rewarded_class(trainer.reward_fn, console)
    if with_probes:
        with nullcontext() if trainer.world is None else trainer.world.main_only():
            rlhf_lab.probes.attach_default_suite(trainer, record)
    return train_on_terminal(trainer, console)


def _console() -> Any:
    """Return a rich console that only the main process prints to."""
    from rlhf_lab.views.terminal import PatientConsole

    return PatientConsole(quiet=process_rank() > 0)


def _print_rewarded_class(reward_fn: Any, console: Any, texts: tuple[str, ...] = ()) -> None:
    """Print the class or logit that a classifier's reward is, and how much of texts it reads."""
    for reward in rlhf_lab.rewards.split_rewards(reward_fn).values():
        if isinstance(reward, rlhf_lab.rewards.SentimentReward | rlhf_lab.rewards.LogitReward):
            print_line(reward.summary(), console)
            rows = [reward.tokenizer.encode(text, verbose=False) for text in texts]
            if n := sum(row.count(reward.tokenizer.unk_token_id) for row in rows):
                print_line(f"unknown words, which {reward.name} does not read: {n}", console)
            if n := sum(len(row) > reward.longest for row in rows):
                print_line(f"texts cut to {reward.longest} tokens: {n}", console)


def score(
    reward: ScoreSettings,
    texts: Positional[tuple[str, ...]] = (),
    device: Device = "auto",
    prompt: str | None = None,
) -> int:
    """Print the reward of texts, from arguments or from standard input with one text per line. Of
    several rewards, the weighted sum is printed first, then each.

    Args:
        texts: Texts to score; of standard input, the lines that are not blank.
        prompt: The prompt of the texts, for rewards that read prompt and response.
    """
    from rich.console import Console

    for text in filter(isfile, texts):
        raise ConfigError(f"{text!r} is a file. To score its lines, use `score < {text}`.")
    lines = list(texts) or _stdin_lines()
    if not lines:
        raise ConfigError("There is no text to score. Pass texts, or one per line on stdin.")
    args = RLHFArgs(preset="reel", **asdict(reward))
    scorer = rlhf_lab.rewards.load_reward(args, rlhf_lab.models.device.pick_device(device))
    prompts = None if prompt is None else [prompt] * len(lines)
    batch = rlhf_lab.rewards.TextBatch([(prompt or "") + line for line in lines], prompts)
    scores = rlhf_lab.rewards.score_batch(scorer, batch)
    _print_rewarded_class(scorer, Console(stderr=True), tuple(batch.texts))
    for i, line in enumerate(lines):
        parts = "".join(f"\t{name} {part[i].item():.4f}" for name, part in scores.by_name.items())
        print(visible(f"{scores.rewards[i].item():.4f}{parts}\t{line}"))
    return 0


def _stdin_lines() -> list[str]:
    """Return the lines of standard input that are not blank; none from a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    if hasattr(sys.stdin, "reconfigure"):  # the C locale accepts all bytes
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    try:
        return [line for line in sys.stdin.read().split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is not in UTF-8 ({error}). Convert it.") from None


def report(directory: RunDirectory, out: Path | None = None) -> int:
    """Write one HTML page about a run, finished or not: curves, samples, probes and their checks.

    Args:
        out: The file to write; report.html in the run's directory by default.
    """
    print_line(f"written: {rlhf_lab.views.write_report(directory, out)}")
    return 0


def view(
    directories: Annotated[Positional[tuple[Path, ...]], arg(help="One or several runs.")],
) -> int:
    """Serve the page of `report` on this machine until Ctrl-C; it grows while the run continues.
    Several runs are shown side by side.
    """
    from rlhf_lab.views.server import PageServer

    if not directories:
        raise ConfigError("There is no run to view. Pass the directories of one or several runs.")
    with PageServer(directories) as server:
        print_line(f"open {server.address} (Ctrl-C ends)")
        server.serve_forever()
    return 0


def doctor() -> int:
    """Show versions and devices, and compare each device with the CPU."""
    return rlhf_lab.doctor.examine()


def course(
    action: Positional[Literal["copy", "open"]], directory: Positional[Path] = Path("rlhf_lessons")
) -> int:
    """Copy the lessons into a new directory, or open them in JupyterLab.

    Args:
        action: Copy; or open the copy, which is made if it does not exist.
        directory: The directory of the lessons, with the solutions in a subdirectory.
    """
    if action == "open":
        return rlhf_lab.course.copying.open_lessons(directory)
    copied = rlhf_lab.course.copying.copy_lessons(directory)
    print_line(f"{len(copied)} notebooks written to {directory}; start with 00_start.ipynb")
    return 0


def show_progress() -> int:
    """Show your progress in the course."""
    rlhf_lab.course.progress()
    return 0
