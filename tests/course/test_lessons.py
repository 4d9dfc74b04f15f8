"""The lessons of this repository ship as their masters say."""

import os
from pathlib import Path

import pytest

from tools.course import builder, gate, runner

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_lesson_is_complete_unsolved_and_up_to_date() -> None:
    assert gate.lesson_problems(ROOT) == []


@pytest.mark.kernel
@pytest.mark.skipif(not os.environ.get("RLHF_LAB_SLOW"), reason="RLHF_LAB_SLOW is unset")
@pytest.mark.parametrize("master", builder.masters(ROOT), ids=lambda path: path.stem)
def test_slow_every_solution_runs_from_top_to_bottom_in_a_fresh_kernel(master: Path) -> None:
    executed = runner.execute(builder.solution_notebook(master), master.stem)
    checks = [cell for cell in executed.cells if cell.source.startswith("check(")]
    assert checks
    for cell in checks:
        assert "✓" in cell.outputs[0].data["text/plain"], cell.source
