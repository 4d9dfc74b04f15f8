"""Forked processes of `warm_python` match those that start Python."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, signal, sys
print(os.getcwd(), os.environ.get("COLOR"), os.environ.get("HOME"), sys.argv, sys.stdin.read())
print("to standard error", file=sys.stderr)
atexit.register(print, "at exit", flush=True)
sys.stdout.flush()
if sys.argv[1].startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
if sys.argv[1] == "error":
    raise ValueError("wrong")
sys.exit({"0": 0, "3": 3, "text": "a message"}[sys.argv[1]])
"""


@pytest.mark.parametrize("end", ["0", "3", "text", "error", "SIGTERM", "SIGKILL"])
def test_process_matches_one_that_starts_python(warm_python, tmp_path, end):
    options = {"cwd": tmp_path, "env": {"COLOR": "red"}}
    warm = warm_python.run(["-c", PROGRAM, end], text="input", **options)
    command = [sys.executable, "-c", PROGRAM, end]
    cold = subprocess.run(command, input="input", capture_output=True, text=True, **options)
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    found, expected = warm.stderr.splitlines(), cold.stderr.splitlines()
    assert found[0] == expected[0] == "to standard error"
    assert found[-1] == expected[-1]  # the traceback has other lines in between
