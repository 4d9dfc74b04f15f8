"""The functions of the maths import none of the libraries that a transformer needs."""

import subprocess
import sys

import pytest

CODE = """
import sys, rlhf_lab.functional, rlhf_lab.config, tests.functional.calls
assert not {"transformer_lens", "transformers", "datasets"} & sys.modules.keys()
"""


@pytest.mark.process
def test_maths_imports_no_transformer():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=300)
