"""Runner of every program: tyro parses typed functions, and an error of the user is one line."""

import atexit
import functools
import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
from tyro.extras import subcommand_cli_from_dict

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.aliases import ALIASES
from rlhf_lab.console import INTERRUPTED, escape_unencodable, visible
from rlhf_lab.errors import LabError, LostRankError, RankError
from rlhf_lab.files import expand_home
from rlhf_lab.parallel.launcher import process_rank

Function = Callable[..., int]


def run_program(
    program: Function | Mapping[str, Function],
    prog: str,
    arguments: Sequence[str] | None = None,
    description: str | None = None,
) -> int:
    """Run a function, or the one named first. Return its status: 2 for an error, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return run_guarded(prog, lambda: parse_call(program, prog, arguments, description)())


def parse_call(
    program: Function | Mapping[str, Function],
    prog: str,
    arguments: Sequence[str],
    description: str | None = None,
    registry: ConstructorRegistry | None = None,
) -> Callable[[], int]:
    """Parse arguments into a partial of the function that they name, without calling it."""
    registry = registry or ConstructorRegistry()
    registry.primitive_rule(_path_from_home)
    options = {"config": (tyro.conf.OmitArgPrefixes,), "registry": registry}
    if not callable(program) and arguments and arguments[0] in program:
        name, *arguments = arguments
        program, prog, description = program[name], f"{prog} {name}", None
    options |= {"prog": prog, "args": list(arguments), "description": description}
    if callable(program):
        try:
            call = tyro.cli(_bind(program), **options)
        except SystemExit:
            _explain_options(prog, arguments)
            raise
        names = [option_name(x).removeprefix("no_") for x in arguments if x.startswith("--")]
        for name in {name for name in names if names.count(name) > 1}:
            warnings.warn(f"option {name} is repeated; only the last one counts.", stacklevel=2)
        return call
    return subcommand_cli_from_dict({k: _bind(call) for k, call in program.items()}, **options)


def option_name(option: str) -> str:
    """Return the name of the parameter that an option such as --gen-len=8 sets."""
    return option.lstrip("-").partition("=")[0].replace("-", "_")


def _explain_options(prog: str, arguments: Sequence[str]) -> None:
    """Print how to set a switch with a value, an option with one dash, or another system's name."""
    switches = [name for name, hint in get_type_hints(RLHFArgs).items() if hint is bool]
    parts = [part for argument in arguments for part in argument.split("=", 1)]
    for option, value in pairwise((*parts, "-")):
        name, is_option = option_name(option), option.startswith("--")
        if re.match("-[a-z]{2}", option):
            _print_error(f"{prog}: {option} has one dash. Use -{option}.")
        elif is_option and name in switches and value[:1] != "-":
            remedy = f"Use {option} or --no-{option[2:]}"
            _print_error(f"{prog}: {option} takes no value, got {value!r}. {remedy}.")
        elif is_option and name in ALIASES and prog.endswith(" train"):
            _print_error(f"{prog}: {option} is the name elsewhere. Use {ALIASES[name]}.")


def _path_from_home(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Expand the `~` of a path, which a shell leaves alone in `--out=~/run`."""
    if info.type is not Path:
        return None

    def expand(values: list[str]) -> Path:
        if not values[0]:  # of a variable that is not set; it would be the working directory
            raise ValueError("the path is empty")
        return expand_home(values[0])

    is_path = lambda x: isinstance(x, Path)
    return PrimitiveConstructorSpec(1, "PATH", expand, is_path, lambda path: [str(path)])


def _bind(function: Function) -> Callable[..., Callable[[], int]]:
    @functools.wraps(function)
    def bind(*values: Any, **named: Any) -> Callable[[], int]:
        return functools.partial(function, *values, **named)

    return bind


def run_guarded(prog: str, run: Callable[[], int]) -> int:
    """Run a program as a process: warnings and errors of the user are one line each."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_SILENT", "true")  # the programs print where a run is
    escape_unencodable()
    atexit.register(gc.freeze)  # without it, Python searches all objects for garbage at its exit
    warnings.showwarning = functools.partial(_show_warning, prog)
    try:
        status = run()
        sys.stdout.flush()  # raise BrokenPipeError here instead of at interpreter exit
        return status
    except LabError as error:
        if process_rank("LOCAL_RANK") == 0 or isinstance(error, RankError):  # one per machine
            _print_error(f"{prog}: {error}")
        return 75 if isinstance(error, LostRankError) else 2
    except KeyboardInterrupt:
        _print_error(f"{prog}: stopped.")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 0
    except (OSError, ImportError, UnicodeError, RecursionError, MemoryError) as error:
        _discard_output()
        _print_error(f"{prog}: {type(error).__name__}: {error}.")
        return 2


def _discard_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:  # Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(prog: str, message: Warning | str, *where: Any) -> None:
    if process_rank() == 0:
        _print_error(f"{prog}: warning: {message}")


def _print_error(text: str) -> None:
    print(visible(text).replace("\n", r"\n"), file=sys.stderr)
