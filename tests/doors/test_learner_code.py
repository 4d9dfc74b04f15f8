"""Answers of learners that do anything but answer: each gets a verdict, and progress is kept."""

import os
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhf_lab.course import check, containment
from rlhf_lab.course.progress_file import ExerciseRecord, note_attempt, read_records
from rlhf_lab.course.registry import find_exercise

HEAD = """\
import functools, inspect, os, signal, sys, threading, time, types, warnings
from rlhf_lab.functional import masked_mean

inner = inspect.unwrap(masked_mean)  # as if a learner had written it: the package's is refused
code = inner.__code__.replace(co_name="right")
right = types.FunctionType(code, inner.__globals__, "masked_mean", inner.__defaults__)
right.__kwdefaults__ = inner.__kwdefaults__
"""
ANSWER = "def masked_mean(*given, **named):\n"
TIMER = pytest.mark.skipif(not hasattr(os, "fork"), reason="no timer on this system")
DIFFERS = {
    "endless loop": ("while True: pass", "longer than"),
    "sleep without end": ("time.sleep(1e6)", "longer than"),
    "loop that catches every Exception": (
        "while True:\n    try: time.sleep(0.01)\n    except Exception: pass",
        "longer than",
    ),
    "lock that nobody opens": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "longer"),
    "sys.exit": ("sys.exit(3)", "end the program"),
    "sys.exit with words": ("sys.exit('bye')", "end the program"),
    "exit": ("exit()", "end the program"),
    "os._exit": ("os._exit(3)", "end the process"),
    "os.abort": ("os.abort()", "end the process"),
    "fork": ("os.fork()", "start a process"),
    "recursion": ("return masked_mean(*given, **named)", "RecursionError"),
    "no return": ("right(*given, **named)", "None"),
    "a text": ("return '<b>[red]x[/]' * 100", "a tensor"),
    "a number": ("return 0.5", "a tensor"),
    "a list of a million": ("return [0] * 1_000_000", "a tensor"),
    "a dict": ("return {'a': 1}", "missing"),
    "an empty tuple": ("return ()", "missing"),
    "a numpy array": ("return right(*given, **named).detach().numpy()", "a tensor"),
    "a function": ("return right", "a tensor"),
    "a class": ("return int", "a tensor"),
    "a generator": ("yield right(*given, **named)", "generator"),
    "another shape": ("return right(*given, **named)[None, None]", "shape"),
    "another dtype": ("return right(*given, **named).double()", "float64"),
    "whole numbers": ("return right(*given, **named).long()", "int64"),
    "complex numbers": ("return right(*given, **named) + 0j", "complex64"),
    "no memory behind it": ("return right(*given, **named).to('meta')", ""),
    "nan": ("return right(*given, **named) * float('nan')", "nan"),
    "detached": ("return right(*given, **named).detach()", "detached"),
    "grad switched off": (
        "import torch\ntorch.set_grad_enabled(False)\nreturn right(*given, **named)",
        "detached",
    ),
    "dtype switched": (
        "import torch\ntorch.set_default_dtype(torch.float64)\nreturn torch.tensor(1.0)",
        "",
    ),
    "argument changed": ("given[0].mul_(0)\nreturn right(*given, **named)", ""),
    "repr that raises": (
        "class Shy:\n    def __repr__(self): raise RuntimeError\nreturn Shy()",
        "a Shy that cannot be shown",
    ),
    "repr without end": (
        "class Slow:\n    def __repr__(self):\n        while True: pass\nreturn Slow()",
        "a Slow that cannot be shown",
    ),
    "a subclass that raises": (
        "import torch\nclass Odd(torch.Tensor):\n    def __torch_function__(*a, **k): raise OSError"
        "\nreturn Odd()",
        "",
    ),
    "an equality that raises": (
        "class Odd:\n    def __eq__(self, other): raise ValueError\nreturn Odd()",
        "a tensor",
    ),
    "error without words": ("raise ValueError", "ValueError: no message"),
    "error in many lines": ("raise ValueError('a\\nb\\nc')", "ValueError: a"),
    "error with markup": ("raise ValueError('[/red] <b> [link=x]')", "[/red] <b> [link=x]"),
    "error whose words raise": (
        "class Odd(Exception):\n    def __str__(self): raise KeyError\nraise Odd",
        "a Odd that cannot be shown",
    ),
    "error of a group": ("raise ExceptionGroup('two', [ValueError(1), OSError(2)])", "two"),
    "error that is no Exception": ("raise GeneratorExit", "GeneratorExit"),
    "error that is a BaseException": ("class Odd(BaseException): pass\nraise Odd('x')", "Odd"),
    "memory": ("return bytearray(2**62)", "MemoryError"),
    "StopIteration": ("next(iter(()))", "StopIteration"),
    "no such file": ("open('nowhere.txt')", "FileNotFoundError"),
    "a file in latin-1": ("open('latin.txt', encoding='utf-8').read()", "UnicodeDecodeError"),
    "a syntax error at run time": ("exec('def x(:')", "SyntaxError"),
    "no such name": ("return maskd_mean", "NameError"),
    "no such package": ("import nosuchpackage", "ModuleNotFoundError"),
}
PASSES = {
    "5 MB printed": "print('x' * 1_000_000)",
    "control characters printed": "print('\\x1b[31m')",
    "standard output replaced": "sys.stdout = sys.stderr = open(os.devnull, 'w')",
    "directory changed": "os.chdir('/')",
    "environment emptied": "os.environ.clear()",
    "progress named elsewhere": "os.environ['RLHF_LAB_PROGRESS'] = 'elsewhere.json'",
    "recursion limit lowered": (
        "sys.setrecursionlimit(len([*__import__('traceback').walk_stack(None)]) + 60)"
    ),
    "warnings as errors": "warnings.simplefilter('error')",
    "a warning": "warnings.warn('look')",
    "a thread that stays": "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
    "its own file deleted": "os.path.exists(__file__) and os.remove(__file__)",
    "seed changed": "__import__('torch').manual_seed(3)",
    "the exit handlers kept": "os._exit = print",
}


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with progress in it, given by a relative name; everything else as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_LAB_PROGRESS", "progress.json")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(containment, "SECONDS_PER_CALL", 0.4)
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    note_attempt("get_advantages", "passed")
    kept = torch.is_grad_enabled(), torch.get_default_dtype(), sys.getrecursionlimit()
    streams, ends = (sys.stdout, sys.stderr), (os._exit, os.fork)
    variables = dict(os.environ)
    try:
        yield
        assert kept[:2] == (torch.is_grad_enabled(), torch.get_default_dtype())
        assert kept[2] == sys.getrecursionlimit() and ends == (os._exit, os.fork)
        changed = dict(os.environ).items() ^ variables.items()
        assert {name for name, _ in changed} <= {"PYTEST_CURRENT_TEST"}
        assert Path.cwd() == tmp_path
    finally:
        torch.set_grad_enabled(kept[0])
        torch.set_default_dtype(kept[1])
        sys.setrecursionlimit(kept[2])
        (sys.stdout, sys.stderr), (os._exit, os.fork) = streams, ends
        os.environ.clear()
        os.environ.update(variables)


def answer(body: str, tmp_path: Path):
    """The function that a learner wrote into a file of their own."""
    source = HEAD + ANSWER + textwrap.indent(body, "    ")
    path = tmp_path / "mine.py"
    path.write_text(source)
    names = {"__file__": str(path), "__name__": "mine"}
    exec(compile(source, str(path), "exec"), names)
    return names["masked_mean"]


@TIMER
@pytest.mark.parametrize("name", DIFFERS)
def test_an_answer_that_is_none_is_told_what_it_did(learner, tmp_path, capsys, name) -> None:
    body, words = DIFFERS[name]
    check(answer(body, tmp_path))
    shown = capsys.readouterr().out
    assert words in shown and "✗ masked_mean" in shown
    kept = {
        "get_advantages": ExerciseRecord("passed", 1),
        "masked_mean": ExerciseRecord("differs", 1),
    }
    assert read_records() == kept


@TIMER
@pytest.mark.parametrize("name", PASSES)
def test_a_right_answer_that_does_more_passes(learner, tmp_path, capsys, name) -> None:
    check(answer(f"{PASSES[name]}\nreturn right(*given, **named)", tmp_path))
    assert "✓ masked_mean" in capsys.readouterr().out
    assert read_records()["masked_mean"] == ExerciseRecord("passed", 1)
    assert read_records()["get_advantages"] == ExerciseRecord("passed", 1)


@TIMER
def test_what_an_answer_switched_off_does_not_hold_for_the_next(learner, tmp_path, capsys) -> None:
    """The package's own function is right still, and a detached answer is not."""
    for name in ("grad switched off", "dtype switched", "sys.exit"):
        check(answer(DIFFERS[name][0], tmp_path))
    capsys.readouterr()
    check(find_exercise("masked_mean").reference)
    assert "✓ masked_mean" in capsys.readouterr().out


SIGNATURES = {
    "no arguments": "def masked_mean(): return 1",
    "three needed": "def masked_mean(a, b, c): return 1",
    "other names": "def masked_mean(*, hello): return 1",
    "async": "async def masked_mean(*a, **k): return right(*a, **k)",
    "a class": "class masked_mean: pass",
    "a partial without a name": "masked_mean = functools.partial(right, None)",
}


@TIMER
@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("name", SIGNATURES)
def test_something_else_than_a_function_is_told(learner, capsys, name) -> None:
    names: dict = {}
    exec(HEAD + SIGNATURES[name], names)
    try:
        check(names["masked_mean"])
    except ValueError as error:
        assert "is no exercise" in str(error) or "exercise" in str(error)
    else:
        assert "✗ masked_mean" in capsys.readouterr().out
    assert read_records()["get_advantages"] == ExerciseRecord("passed", 1)


@pytest.mark.process
def test_a_process_ends_with_its_verdict(warm_python, tmp_path) -> None:
    """A loop, an exit and a thread that stays do not keep the program or its progress."""
    program = HEAD + (
        "from rlhf_lab.course import check, containment\n"
        "containment.SECONDS_PER_CALL = 0.2\n"
        "def masked_mean(*given, **named):\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "    while True: pass\n"
        "check(masked_mean)\n"
        "def masked_mean(*given, **named): os._exit(5)\n"
        "check(masked_mean)\n"
        "check(inner)\n"
        "print('the end')\n"
    )
    env = warm_python.environment | {"RLHF_LAB_PROGRESS": str(tmp_path / "p.json")}
    done = warm_python.run(["-c", program], cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("the end\n"), done.stderr
    assert done.stdout.count("✗ masked_mean") == 2
    assert '"attempts": 2' in (tmp_path / "p.json").read_text()
    assert threading.active_count() < 50


@pytest.mark.process
def test_the_author_s_check_looks_at_its_root_before_the_exercises(cold_python, tmp_path) -> None:
    done = cold_python(["-m", "tools.course", "check", "--root", str(tmp_path / "nope")])
    assert done.returncode == 2 and "nope" in done.stderr and done.stderr.count("\n") == 1
