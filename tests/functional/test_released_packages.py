"""The numbers in reference/ are what the released packages make: they are run again, as processes.

`make test-reference` builds an environment for each and runs this; without, it is skipped, and only
whether anything has changed since is looked at.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.functional.reference.digest import WRITTEN, digest

HERE = Path(__file__).parent / "reference"
VARIABLE = "RLHF_LAB_REFERENCES"
MADE_BY = {
    "torchtune": "torchtune",
    "torchrl": "torchrl",
    "trl": "trl",
    "trl_step": "trl",
    "verl": "verl",
}
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}
"""What single precision leaves between two processors."""
ROUNDING_AFTER_STEPS = {"rtol": 2e-4, "atol": 3e-5}
"""The same once weights were stepped with it. 9e-5 nats of 1.1 were seen between the numbers of a
processor with AVX-512 and those that it makes without any vector instructions, which
`ATEN_CPU_CAPABILITY=default` asks for."""
BEHIND_STEPS = re.compile(r"trl_step/\w*steps/[12]/")


@pytest.fixture(params=MADE_BY)
def script(request) -> str:
    return request.param


@pytest.fixture
def python(script) -> Path:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is unset; make test-reference builds the packages and sets it")
    python = Path(os.environ[VARIABLE], MADE_BY[script], "bin", "python").absolute()
    if not python.exists():
        pytest.skip(f"{MADE_BY[script]} is not installed; make reference builds it")
    return python


def same(found: object, stored: object, where: str) -> None:
    """Equal in structure, and in numbers up to rounding."""
    if isinstance(stored, dict):
        assert found.keys() == stored.keys(), where
        for key in stored:
            same(found[key], stored[key], f"{where}/{key}")
    elif isinstance(stored, list) and not is_numeric(stored):
        assert len(found) == len(stored), where
        for i, pair in enumerate(zip(found, stored, strict=True)):
            same(*pair, f"{where}/{i}")
    elif isinstance(stored, str | bool | None):
        assert found == stored, where
    else:
        bounds = ROUNDING_AFTER_STEPS if BEHIND_STEPS.match(where) else ROUNDING
        np.testing.assert_allclose(found, stored, **bounds, err_msg=where)


def is_numeric(rows: list) -> bool:
    """Whether a list, at any depth, is an array of numbers."""
    try:
        return np.asarray(rows).dtype.kind in "if"
    except ValueError:
        return False


@pytest.mark.process
def test_the_stored_numbers_are_what_the_released_package_makes(script, python, tmp_path):
    place = tmp_path / "reference"
    shutil.copytree(HERE, place, ignore=shutil.ignore_patterns("*.json", "__pycache__"))
    bare = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [python, place / f"make_{script}.py"], capture_output=True, text=True, env=bare
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads((place / f"{script}.json").read_text())
    stored = json.loads((HERE / f"{script}.json").read_text())
    assert stored
    same(made, stored, script)


def test_nothing_has_changed_since_the_numbers_were_made():
    assert WRITTEN.read_text().strip() == digest(), "run `make test-reference`"
