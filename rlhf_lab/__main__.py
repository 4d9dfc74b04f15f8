"""The command line, `python -m rlhf_lab`: its commands, and the defaults of presets."""

import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import fields
from inspect import signature
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any

from tyro.conf import arg
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from rlhf_lab import (
    best_of_n_command,
    commands,
    compare_command,
    model_commands,
    sample_command,
    tuning_commands,
)
from rlhf_lab.config import GROUPS, PRESETS, RLHFArgs
from rlhf_lab.config.args import settings_of
from rlhf_lab.entry import guarded, read_call
from rlhf_lab.errors import ConfigError

DESCRIPTION = "RLHF you can see inside: train a policy, look at it, go on with it."
DEFAULT_PRESET = "reel"
NEEDS = MappingProxyType(
    {
        "--preset": f"a name; choose one of {', '.join(PRESETS)}",
        "--config": "a YAML or JSON file, such as a run's run.json",
    }
)
"""What the options are followed by that decide the defaults of the others."""
FLAGS = frozenset(field.name for field in fields(RLHFArgs) if field.type is bool)
"""Settings that are on or off."""
COMMANDS = MappingProxyType(
    {
        "train": commands.train,
        "resume": commands.resume,
        "sample": sample_command.write_samples,
        "score": commands.score,
        "train-reward": model_commands.train_reward,
        "sft": tuning_commands.sft,
        "dpo": tuning_commands.dpo,
        "kto": tuning_commands.kto,
        "orpo": tuning_commands.orpo,
        "best-of-n": best_of_n_command.best_of_n_command,
        "compare": compare_command.compare_command,
        "export": model_commands.export,
        "report": commands.report,
        "doctor": commands.doctor,
        "course": commands.course,
        "progress": commands.show_progress,
    }
)


def parse(arguments: list[str]) -> Callable[[], int]:
    """The call that the command line describes, not carried out yet: a partial with its options.

    For `train`, the defaults are those of the file and of the preset that it names.

    Raises:
        ConfigError: an option or preset that does not exist, or values that do not go together.
    """
    if "--out=" in arguments or ("--out", "") in pairwise(arguments):
        raise ConfigError("--out is empty; name a place, such as runs/first.")
    if arguments[:1] == ["train"]:
        arguments = [_as_flag(argument) for argument in arguments]
    if arguments[:1] == ["resume"]:
        _refuse_fixed(arguments[1:])
    base = _base(arguments) if arguments[:1] == ["train"] else {"preset": DEFAULT_PRESET}
    asked = {_field_of(argument) for argument in arguments if argument.startswith("--")}
    registry = ConstructorRegistry()
    registry.struct_rule(lambda info: _in_groups(info, base, asked))
    return read_call(COMMANDS, "rlhf_lab", arguments, DESCRIPTION, registry)


def _base(arguments: list[str]) -> dict[str, Any]:
    """The fields that the options of `train` stand over: those of a file, and the preset's name.

    Raises:
        ConfigError: see `_value_of`; or a file that holds no settings that can be.
    """
    file, preset = (_value_of(name, arguments) for name in ("--config", "--preset"))
    named = {} if preset is None else {"preset": preset}
    if file is None:
        return {"preset": DEFAULT_PRESET} | named
    RLHFArgs.from_file(file, **named)  # a wrong value is told with the file's name
    return {"preset": DEFAULT_PRESET} | settings_of(file) | named


def _refuse_fixed(options: list[str]) -> None:
    """Refuse by name the settings of a run that `resume` cannot change."""
    can_change = signature(commands.resume).parameters
    for option in options:
        name = _field_of(option)
        if option.startswith("--") and name not in can_change:
            if any(field.name == name.removeprefix("no_") for field in fields(RLHFArgs)):
                raise ConfigError(
                    f"{option} cannot change when a run goes on, only "
                    f"{', '.join(list(can_change)[1:])} can; start a new run for it."
                )


def _as_flag(argument: str) -> str:
    """`--name=True` and `--name=False` of a setting, as wandb's agent writes them, as a flag."""
    option, _, value = argument.partition("=")
    if value.lower() not in ("true", "false") or _field_of(argument) not in FLAGS:
        return argument
    return option if value.lower() == "true" else f"--no-{option.removeprefix('--')}"


def _field_of(option: str) -> str:
    """The field that an option sets: `--no-` in front turns one off, a value may follow."""
    return option.removeprefix("--").partition("=")[0].replace("-", "_")


def _in_groups(
    info: StructTypeInfo, base: Mapping[str, Any], asked: Set[str]
) -> StructConstructorSpec | None:
    """Let tyro ask for the settings of a run group by group, with options that stay flat.

    Fields that were not asked for are left to the file and the preset, and may give way.
    """
    if info.type is not RLHFArgs:
        return None
    defaults, specs = RLHFArgs(**base), []
    for title, group in GROUPS.items():
        default = group(**{field.name: getattr(defaults, field.name) for field in fields(group)})
        specs.append(StructFieldSpec(title, Annotated[group, arg(name=title)], default))
    asked = asked | {name.removeprefix("no_") for name in asked}

    def from_groups(**groups: Any) -> RLHFArgs:
        read = {k: value for group in groups.values() for k, value in vars(group).items()}
        return RLHFArgs(**(base | {name: read[name] for name in read.keys() & asked}))

    return StructConstructorSpec(from_groups, tuple(specs))


def _value_of(option: str, arguments: list[str]) -> str | None:
    """The value of an option that decides the defaults of the others; None if it is not there.

    Raises:
        ConfigError: it has none, or stands there twice: the last would be noted as the run's, and
            the first would decide.
    """
    named: list[str] = []
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            named.append(argument.removeprefix(f"{option}="))
        elif argument == option:
            if i + 1 == len(arguments):
                raise ConfigError(f"{option} needs {NEEDS[option]}.")
            named.append(arguments[i + 1])
    if len(named) > 1:
        raise ConfigError(f"{option} is given {len(named)} times ({', '.join(named)}); give one.")
    return named[0] if named else None


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, 2 when something is for the user to fix."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded("rlhf_lab", lambda: parse(given)())


if __name__ == "__main__":
    sys.exit(main())
