"""The command line, `python -m rlhf_lab`: its commands, and the settings of `train`."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Set
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any

from tyro.conf import arg
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from rlhf_lab import commands, compare_commands, model_commands, tuning_commands
from rlhf_lab.cli_runner import option_name, parse_call, run_guarded
from rlhf_lab.config import GROUPS, RLHFArgs
from rlhf_lab.config.args import read_settings

DESCRIPTION = "RLHF you can see inside: train a policy, inspect it, continue from it."
DEFAULT_PRESET = "reel"
COMMANDS = MappingProxyType(
    {
        "train": commands.train,
        "resume": commands.resume,
        "sample": model_commands.sample_command,
        "score": commands.score,
        "train-reward": tuning_commands.train_reward,
        "sft": tuning_commands.sft,
        "dpo": tuning_commands.dpo,
        "kto": tuning_commands.kto,
        "orpo": tuning_commands.orpo,
        "best-of-n": compare_commands.best_of_n_command,
        "compare": compare_commands.compare_command,
        "export": model_commands.export,
        "report": commands.report,
        "view": commands.view,
        "doctor": commands.doctor,
        "course": commands.course,
        "progress": commands.show_progress,
    }
)


def parse(arguments: list[str]) -> Callable[[], int]:
    """Parse a command line into a partial of its command, without calling it.

    For `train`, `--config` and `--preset` set the defaults.
    """
    registry = None
    if arguments[:1] == ["train"]:
        arguments = [_to_flag(argument) for argument in arguments]
        base = _base_settings(arguments)
        names = {option_name(argument) for argument in arguments if argument.startswith("--")}
        given = names | {name.removeprefix("no_") for name in names}
        registry = ConstructorRegistry()
        registry.struct_rule(lambda info: _group_settings(info, base, given))
    return parse_call(COMMANDS, "rlhf_lab", arguments, DESCRIPTION, registry)


def _base_settings(arguments: list[str]) -> dict[str, Any]:
    """Read the settings that the options of `train` override: those of a file, and a preset."""
    reader = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--config", "--preset"):
        reader.add_argument(option, nargs="?")
    options, _ = reader.parse_known_args(arguments)
    preset = {} if options.preset is None else {"preset": options.preset}
    if options.config is None:
        return {"preset": DEFAULT_PRESET} | preset
    RLHFArgs.from_file(options.config, **preset)  # its errors name the file
    return {"preset": DEFAULT_PRESET} | read_settings(options.config) | preset


def _to_flag(argument: str) -> str:
    """Convert `--name=True` of a boolean setting, as wandb's sweep agent writes it, to a flag."""
    option, _, value = argument.partition("=")
    flags = {field.name for field in fields(RLHFArgs) if field.type is bool}
    if value.lower() not in ("true", "false") or option_name(argument) not in flags:
        return argument
    return option if value.lower() == "true" else f"--no-{option.removeprefix('--')}"


def _group_settings(
    info: StructTypeInfo, base: Mapping[str, Any], given: Set[str]
) -> StructConstructorSpec | None:
    """Show the settings of a run in groups, and set only the fields that were given.

    All other fields come from the file and the preset, which a method may override.
    """
    if info.type is not RLHFArgs:
        return None
    defaults, specs = RLHFArgs(**base), []
    for title, group in GROUPS.items():
        default = group(**{field.name: getattr(defaults, field.name) for field in fields(group)})
        specs.append(StructFieldSpec(title, Annotated[group, arg(name=title)], default))

    def from_groups(**groups: Any) -> RLHFArgs:
        parsed = {name: value for group in groups.values() for name, value in vars(group).items()}
        return RLHFArgs(**(base | {name: parsed[name] for name in parsed.keys() & given}))

    return StructConstructorSpec(from_groups, tuple(specs))


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status, 2 for an error of the user."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_guarded("rlhf_lab", lambda: parse(arguments)())


if __name__ == "__main__":
    sys.exit(main())
