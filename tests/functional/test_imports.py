"""The functions of the maths import none of the libraries that a transformer needs."""

CODE = """
import sys, rlhf_lab.functional, rlhf_lab.config, tests.functional.calls
assert not {"transformer_lens", "transformers", "datasets"} & sys.modules.keys()
"""


def test_maths_imports_no_transformer(cold_python):
    cold_python(["-c", CODE]).check_returncode()
