"""The list of injected faults fits the source and the tests."""

from pathlib import Path

import pytest

from tests.faults import inject, read_faults


@pytest.mark.slow
def test_lines_of_faults_fit_source_and_tests():
    for fault in read_faults():
        inject(fault)  # raises if the old text does not occur exactly once
        for name in fault.tests:
            file, *functions = name.split("::")
            path = Path(__file__).parent / file
            missing = [x for x in functions if f"def {x.split('[')[0]}(" not in path.read_text()]
            assert path.exists() and not missing, f"{fault}: there is no test {name}"
