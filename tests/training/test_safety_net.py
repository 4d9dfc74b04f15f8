"""Digests of the trained weights and all numbers of the reports, for fixed configurations.

A commit that changes numbers on purpose rewrites `safety_net.json` with
`python -m tests.training.test_safety_net`, and explains why.
"""

import hashlib
import json
import math
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.training import PhaseReport
from tests.training.recorded_runs import CONFIGURATIONS, GOLDEN, RecordedRun, copy_weights

STORED = Path(__file__).with_name("safety_net.json")
PHASES = 2
NOT_KEPT = ("cost",)  # depends on the clock
STEPS = "step from outside"


def step_from_outside(directory: Path) -> tuple[dict[str, Tensor], list[PhaseReport]]:
    """Train with TRL's `step`: queries, responses and scores from outside."""
    trainer = RLHFTrainer(RLHFArgs(**GOLDEN | {"gen_len": 24}), out=directory)
    queries = ["this movie", "honestly , the plot", "anyway , the acting was so"] * 6
    reports = []
    for phase in range(PHASES):
        responses = trainer.generate(queries[:16])
        scores = [math.sin(row + phase) for row in range(16)]
        reports.append(trainer.step(queries[:16], responses, scores))
    return copy_weights(trainer.policy), reports


def machine() -> dict[str, str]:
    """Return everything that the rounding of sums depends on."""
    file = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", file.read_text()) if file.exists() else None
    return {
        "processor": model[1] if model else platform.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def digest(weights: dict[str, Tensor], reports: list[PhaseReport]) -> dict[str, Any]:
    """Return the digest of the weights, and the reports without their costs."""
    digest = hashlib.sha256()
    for key, weight in sorted(weights.items()):
        digest.update(key.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    lines = [report.to_dict() for report in reports]
    kept = [{k: v for k, v in line.items() if k not in NOT_KEPT} for line in lines]
    return {"digest": digest.hexdigest(), "reports": kept}


NAMES = [*(name for name, each in CONFIGURATIONS.items() if each.is_golden), STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_configuration_trains_to_the_stored_numbers(name: str, runs: Any, tmp_path: Path) -> None:
    """Bitwise on the machine that wrote the file; within 1e-4 elsewhere, in bf16 1.6e-2.

    That is twice bf16's distance between neighbors: processors with matrix units for bf16 (AMX)
    add up in another order, which moved a gradient's norm by 1.1 %.
    """
    stored = json.loads(STORED.read_text())
    before, same_machine = stored["configurations"][name], machine() == stored["machine"]
    outcome = step_from_outside(tmp_path) if name == STEPS else runs(name).after(PHASES)
    found = digest(*outcome)
    tolerance = 2 * torch.finfo(torch.bfloat16).eps if "bf16" in name else 1e-4
    limits = {"rel": 0, "abs": 0} if same_machine else {"rel": tolerance, "abs": tolerance}
    for line, expected in zip(found["reports"], before["reports"], strict=True):
        numbers = {k: pytest.approx(v, **limits) for k, v in expected.items() if v is not None}
        assert line == expected | numbers
    if same_machine:
        assert found["digest"] == before["digest"]


def main() -> None:
    """Write the numbers of this machine."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = {STEPS: digest(*step_from_outside(Path(directory, "steps")))}
        for name in NAMES[:-1]:
            settings, make_parts, _, hook, _ = CONFIGURATIONS[name]
            args, out = RLHFArgs(**settings), Path(directory, name)
            run = RecordedRun(RLHFTrainer(args, out=out, **make_parts()), hook)
            found[name] = digest(*run.after(PHASES))
    text = json.dumps({"machine": machine(), "configurations": found}, indent=1)
    STORED.write_text(text + "\n")


if __name__ == "__main__":
    main()
