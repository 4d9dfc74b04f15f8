"""Probes on residuals as wide as a real model's, in a process with several threads.

torch's batched LU fails or hangs there (pytorch/pytorch issue 142815), and the tests' own process
has one thread and narrow models, where it does not.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SOLVED = """
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

MEMORY = """
import torch
from rlhf_lab.probes.direction import fit_each_site
from rlhf_lab.probes.value_lens import held_out_fits
from rlhf_lab.training.report import peak_memory_bytes

torch.set_num_threads(1)
here = torch.device("cpu")
sites, batch, seq, width = 6, 12, 8, 512
x = torch.randn(sites, batch, seq, width, generator=torch.Generator().manual_seed(0))
label, everywhere = torch.arange(batch) % 2 == 0, torch.ones(batch, seq, dtype=torch.bool)
one_site = seq * width**2 * 8
for fit in (
    lambda x: fit_each_site(x.transpose(1, 2), label, "lda"),
    lambda x: held_out_fits(x, x[0, ..., 0], everywhere),
):
    fit(x[:1])
    before = peak_memory_bytes(here)
    fit(x)
    print((peak_memory_bytes(here) - before) / one_site)
"""


def run(script: str) -> list[float]:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def test_ridge_and_lda_are_solved_for_wide_models_in_two_threads():
    slope, others, intercept, planted = run(SOLVED)
    assert (round(slope, 4), round(others, 4), round(intercept, 4)) == (3, 0, 1)
    assert planted > 0.6


def test_the_memory_of_a_fit_is_that_of_one_site():
    """From one site to six, in units of one site's matrices; all at once would take five more."""
    grown = run(MEMORY)
    assert len(grown) == 2 and max(grown) < 2
