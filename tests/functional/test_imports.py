"""The tests of the maths run without the libraries that a transformer needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLLECT = """
import sys
import pytest

assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]]) == 0
print([name for name in ("transformer_lens", "transformers", "datasets") if name in sys.modules])
"""


@pytest.mark.process
@pytest.mark.parametrize("tests", ["tests/functional", "tests/test_config.py"])
def test_collecting_the_tests_of_the_maths_imports_no_transformer(tests):
    command = [sys.executable, "-c", COLLECT, tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
