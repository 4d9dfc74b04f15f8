"""The command line, `python -m rlhf_lab`: its commands, and the defaults of presets."""

import sys
from collections.abc import Callable
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

from rlhf_lab import commands, model_commands
from rlhf_lab.config import GROUPS, PRESETS, RLHFArgs
from rlhf_lab.entry import guarded, read_call
from rlhf_lab.errors import ConfigError

DESCRIPTION = "RLHF you can see inside: train a policy, look at it, go on with it."
DEFAULT_PRESET = "reel"
COMMANDS = MappingProxyType(
    {
        "train": commands.train,
        "resume": commands.resume,
        "sample": commands.write_samples,
        "score": commands.score,
        "train-reward": model_commands.train_reward,
        "sft": model_commands.sft,
        "dpo": model_commands.dpo,
        "export": model_commands.export,
        "report": commands.report,
        "doctor": commands.doctor,
        "progress": commands.show_progress,
    }
)


def parse(arguments: list[str]) -> Callable[[], int]:
    """The call that the command line describes, not carried out yet: a partial with its options.

    For `train`, the defaults are those of the preset that it names.

    Raises:
        ConfigError: an option or preset that does not exist, or values that do not go together.
    """
    if "--out=" in arguments or ("--out", "") in pairwise(arguments):
        raise ConfigError("--out is empty; name a place, such as runs/first.")
    if arguments[:1] == ["resume"]:
        _refuse_fixed(arguments[1:])
    preset = _named_preset(arguments) if arguments[:1] == ["train"] else DEFAULT_PRESET
    registry = ConstructorRegistry()
    registry.struct_rule(lambda info: _in_groups(info, preset))
    return read_call(COMMANDS, "rlhf_lab", arguments, DESCRIPTION, registry)


def _refuse_fixed(options: list[str]) -> None:
    """Refuse by name the settings of a run that `resume` cannot change."""
    can_change = signature(commands.resume).parameters
    for option in options:
        name = option.removeprefix("--").partition("=")[0].replace("-", "_")
        if option.startswith("--") and name not in can_change:
            if any(field.name == name.removeprefix("no_") for field in fields(RLHFArgs)):
                raise ConfigError(
                    f"{option} cannot change when a run goes on, only "
                    f"{', '.join(list(can_change)[1:])} can; start a new run for it."
                )


def _in_groups(info: StructTypeInfo, preset: str) -> StructConstructorSpec | None:
    """Let tyro ask for the settings of a run group by group, with options that stay flat."""
    if info.type is not RLHFArgs:
        return None
    defaults, specs = RLHFArgs(preset=preset), []
    for title, group in GROUPS.items():
        default = group(**{field.name: getattr(defaults, field.name) for field in fields(group)})
        specs.append(StructFieldSpec(title, Annotated[group, arg(name=title)], default))
    return StructConstructorSpec(_from_groups, tuple(specs))


def _from_groups(**groups: Any) -> RLHFArgs:
    """The settings whose groups were read one by one."""
    return RLHFArgs(**{k: value for group in groups.values() for k, value in vars(group).items()})


def _named_preset(arguments: list[str]) -> str:
    """The value of --preset, which decides the other defaults.

    Raises:
        ConfigError: it has none, or stands there twice: the last would be noted as the run's, and
            the first would decide.
    """
    named: list[str] = []
    for i, argument in enumerate(arguments):
        if argument.startswith("--preset="):
            named.append(argument.removeprefix("--preset="))
        elif argument == "--preset":
            if i + 1 == len(arguments):
                raise ConfigError(f"--preset needs a name; choose one of {', '.join(PRESETS)}.")
            named.append(arguments[i + 1])
    if len(named) > 1:
        raise ConfigError(f"--preset is given {len(named)} times ({', '.join(named)}); give one.")
    return named[0] if named else DEFAULT_PRESET


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, 2 when something is for the user to fix."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded("rlhf_lab", lambda: parse(given)())


if __name__ == "__main__":
    sys.exit(main())
