"""RLHFArgs: all settings of a run in one frozen dataclass, with presets and files."""

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lab.config.algorithm_fields import AllFields
from rlhf_lab.config.aliases import suggest_field
from rlhf_lab.config.checks import check_args
from rlhf_lab.config.presets import PAPER_METHODS, PRESETS
from rlhf_lab.errors import ConfigError
from rlhf_lab.files import expand_home


def _fill_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Return given fields, the method's and the preset's; rates, warm-up and minibatches fit."""
    names = [field.name for field in dataclasses.fields(AllFields)]
    for name in given.keys() - names:
        remedy = suggest_field(name, names)
        remedy = f"Use {remedy}" if remedy else "See `help(RLHFArgs)`"
        raise ConfigError(f"RLHFArgs has no field {name!r}. {remedy}.")
    preset = given.get("preset", AllFields.preset)
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"Unknown preset={preset!r}. Choose one of: {', '.join(PRESETS)}.")
    settings = PAPER_METHODS.get(str(given.get("method")), {})
    fields = PRESETS[preset] | settings | given
    value = lambda name: fields.get(name, getattr(AllFields, name))
    phases, batch = value("total_phases"), value("batch_size")
    if "warmup_steps" not in given and type(phases) is int and phases >= 1:
        fields["warmup_steps"] = min(value("warmup_steps"), phases - 1)
    if "num_minibatches" not in given and type(batch) is int and batch >= 1:
        numbers = range(value("num_minibatches"), 0, -1)
        fields["num_minibatches"] = next(n for n in numbers if batch % n == 0)
    if "base_lr" not in given and (value("lora_rank") or value("adapter_path")):
        # about ten times the rates of all weights
        fields["base_lr"] = 1e-3 if preset.startswith(("reel", "sums")) else 3e-4
    return fields


@dataclass(frozen=True, init=False)
class RLHFArgs(AllFields):
    """The validated settings of one run. Other fields have the method's or preset's value."""

    __signature__ = inspect.signature(AllFields)  # for completion in notebooks

    def __init__(self, **given: Any) -> None:
        for name, value in _fill_defaults(given).items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
        check_args(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values, which are valid arguments."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> "RLHFArgs":
        """Load settings from a YAML or JSON file, such as the run.json of a run.

        Args:
            changes: fields that override those of the file.

        Raises:
            ConfigError: If the file or a value is not valid. The message names the file.
        """
        fields = read_settings(path)
        try:
            args = cls(**(fields | changes))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        before = str(fields.get("preset", args.preset))
        unused = {*PRESETS.get(before, ()), *PRESETS[args.preset]} <= fields.keys()
        if unused and before != args.preset:
            problem = f"preset={args.preset!r} has no effect, because {path} sets all its fields"
            raise ConfigError(f"{problem}. Remove it.")
        return args


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read the fields in a YAML 1.2 or JSON file, not validated; of run.json, its entry `args`."""
    from ruamel.yaml import YAML, YAMLError  # slow import, not for --help

    try:
        fields = YAML(typ="safe", pure=True).load(expand_home(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Use a file in UTF-8.") from None
    except YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML ({problem}). Correct it.") from None
    if isinstance(fields, dict) and isinstance(fields.get("args"), dict):
        fields = fields["args"]
    if not isinstance(fields, dict) or not fields:
        raise ConfigError(f"{path} has no fields. Write one per line, such as kl_coef: 0.1.")
    return {str(name): value for name, value in fields.items()}
