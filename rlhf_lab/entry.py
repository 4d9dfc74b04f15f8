"""Entry point of a program: arguments parsed by tyro, each mistake answered in one sentence."""

import contextlib
import errno
import functools
import io
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry
from tyro.extras import subcommand_cli_from_dict

from rlhf_lab.console import INTERRUPTED, visible, write_out_what_cannot_be_encoded
from rlhf_lab.errors import ConfigError, LabError, LostRankError, RankError
from rlhf_lab.launcher import is_main_process, local_rank

Function = Callable[..., int]
PATH_PROBLEMS = frozenset(
    {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EROFS}
)
"""What the system says of a path that cannot be used as it is, wherever it is used first."""
SHOWN_CHARACTERS = 60


def run_program(
    program: Function | Mapping[str, Function],
    prog: str,
    arguments: Sequence[str] | None = None,
    description: str | None = None,
) -> int:
    """Run a typed function, or the one of several that the first argument names.

    Args:
        program: the function, or functions by the names of their commands; each returns the exit
            status, and each parameter with its docstring is an option.
        arguments: the command line; this process's own when not given.
        description: what `--help` says above the commands.

    Returns:
        The exit status: the function's own, 2 for a mistake of the user's, 130 after Ctrl-C.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    return guarded(prog, lambda: read_call(program, prog, given, description)())


def read_call(
    program: Function | Mapping[str, Function],
    prog: str,
    arguments: Sequence[str],
    description: str | None = None,
    registry: ConstructorRegistry | None = None,
) -> Callable[[], int]:
    """The call that the arguments describe, not carried out yet: a partial with its options.

    Args:
        registry: rules for types that tyro is to take apart in another way.

    Raises:
        ConfigError: arguments that the program does not take.
    """
    options = {"config": (tyro.conf.OmitArgPrefixes,), "registry": registry}
    name, *rest = arguments or [""]
    if not callable(program) and name in program:
        program, prog, arguments, description = program[name], f"{prog} {name}", rest, None
    options |= {"prog": prog, "args": list(arguments), "description": description}
    with _one_sentence(prog):
        if callable(program):
            return tyro.cli(_bound(program), **options)
        functions = {name: _bound(function) for name, function in program.items()}
        return subcommand_cli_from_dict(functions, **options)


def _bound(function: Function) -> Callable[..., Callable[[], int]]:
    """A function with the same parameters that returns the call instead of making it."""

    @functools.wraps(function)
    def bind(*values: Any, **named: Any) -> Callable[[], int]:
        return functools.partial(function, *values, **named)

    return bind


@contextlib.contextmanager
def _one_sentence(prog: str) -> Any:
    """Turn tyro's panel about a mistake into one sentence."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            yield
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│ ") for line in complaint.getvalue().splitlines()[1:]]
        below_title = itertools.dropwhile(_is_rule, lines)
        problem = " ".join(itertools.takewhile(lambda line: not _is_rule(line), below_title))
        raise ConfigError(f"{problem.rstrip('. ')}; see `{prog} --help`.") from None


def _is_rule(line: str) -> bool:
    """Whether a line of tyro's panel is drawn; where the encoding has no ─, with hyphens."""
    return set(line) <= set("─-╰╯")


def _speaks(error: LabError) -> bool:
    """Whether this process of several says an error: the first of a machine, which has its log."""
    if isinstance(error, LostRankError):
        return error.is_first
    return local_rank() == 0 or isinstance(error, RankError)


def guarded(prog: str, run: Callable[[], int]) -> int:
    """Run a program in a process of its own: warnings and errors are one line each."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_SILENT", "true")  # the programs say themselves where a run is
    write_out_what_cannot_be_encoded()
    warnings.showwarning = functools.partial(_show_warning, prog)
    # transformers imports bitsandbytes where it is there, which then names kernels it would like.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        _refuse_lost_directory()
        status = run()
        sys.stdout.flush()  # a reader that went away is noticed here, not when Python ends
        return status
    except LabError as error:
        if _speaks(error):
            print(_in_a_line(f"{prog}: {error}"), file=sys.stderr)
        return 75 if isinstance(error, LostRankError) else 2
    except KeyboardInterrupt:
        print(f"{prog}: stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, UnicodeEncodeError, RecursionError, MemoryError, RuntimeError) as error:
        problem = _of_what_was_given(error)
        if problem is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # Python would meet it once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{prog}: {problem}", file=sys.stderr)
        return 2


def _refuse_lost_directory() -> None:
    """Say so if the working directory was deleted, in which libraries end without a word of it.

    Raises:
        ConfigError: it was.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory is gone; change to one that is there.") from None


def _of_what_was_given(error: Exception) -> str | None:
    """One sentence on an error that any input can cause, whichever line meets it first.

    None for all others, which are the package's own and keep their stack.
    """
    if isinstance(error, OSError) and error.filename is not None and error.errno in PATH_PROBLEMS:
        name = str(error.filename).encode(errors="backslashreplace").decode()
        if len(name) > SHOWN_CHARACTERS:
            name = f"{name[:SHOWN_CHARACTERS]}... ({len(name)} characters)"
        return f"cannot use {name}: {error.strerror}; choose another path, or correct that one."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return "cannot write: no space left on the device; make room, or print to another place."
    if isinstance(error, UnicodeEncodeError) and error.encoding.replace("-", "") == "utf8":
        found = error.object[error.start : error.end]
        return f"a text holds {found!a}, half of a character; save it as UTF-8, or leave it out."
    if isinstance(error, RecursionError):
        return "what was given is nested too deeply to be read; give lists and objects less deep."
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "the memory does not suffice; ask for less at once: fewer samples, a smaller batch."
    return None


def _show_warning(prog: str, message: Warning | str, *where: Any) -> None:
    """A warning as one line, without the line of code that gave it; of several processes, once."""
    if not is_main_process():
        return
    print(_in_a_line(f"{prog}: warning: {message}"), file=sys.stderr)


def _in_a_line(text: str) -> str:
    """A text whose control characters and line breaks are written out, as of odd names."""
    return visible(text).replace("\n", r"\n")
