"""Probes on residuals as wide as a real model's, in a process with several threads.

torch's batched LU fails or hangs there (pytorch/pytorch issue 142815), and the tests' own process
has one thread and narrow models, where it does not.
"""

import subprocess
import sys

SCRIPT = """
import torch
from rlhf_lab.probes.direction import fit_direction
from rlhf_lab.probes.value_lens import fit_ridge

torch.set_num_threads(2)
x = torch.randn(12, 300, 256, generator=torch.Generator().manual_seed(0))
label = x[..., 0] > 0
slope, intercept = fit_ridge(x, 3 * x[..., 5] + 1, torch.ones(12, 300, dtype=torch.bool), 1e-9)
print(float(slope[:, 5].min()), float(slope[:, 6].abs().max()), float(intercept.max()))
planted = x + 9 * label[:1, :, None] * torch.eye(256)[7]
fitted = fit_direction(planted, label[0], "lda", 0.1)
print(float(fitted.direction[:, 7].min()))
"""


def test_ridge_and_lda_are_solved_for_wide_models_in_two_threads():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    slope, others, intercept, planted = map(float, done.stdout.split())
    assert (round(slope, 4), round(others, 4), round(intercept, 4)) == (3, 0, 1)
    assert planted > 0.6
