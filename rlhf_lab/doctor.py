"""Diagnostics of this machine: versions, and each device compared with the CPU."""

import platform
from collections.abc import Iterator
from importlib.metadata import distributions

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_lab import __version__
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.models.device import validate_half_precision
from rlhf_lab.models.hooked_model import final_residuals
from rlhf_lab.training import ReplayMemory, RLHFTrainer, objective_terms

PACKAGES = ("torch", "transformer_lens", "transformers", "datasets", "numpy")
EXTRAS = ("wandb", "trackio", "tensorboard", "bitsandbytes", "jupyterlab")
NOISE = 0.02  # added to the weights
Finding = tuple[str, str, bool | None]  # subject, result, and True or False if it is compared
Gap = tuple[str, float, float]  # what is compared, the difference, and its tolerance


def examine() -> int:
    """Print all findings and return 1 if one of them is wrong."""
    table = Table("what", "found", "", box=None)
    table.add_row("python", platform.python_version(), "")
    table.add_row("rlhf_lab", __version__, "")
    for package in (*PACKAGES, *EXTRAS):
        found = next(distributions(name=package), None)
        table.add_row(package, found.version if found else "not installed", "")
    findings = list(compare_devices())
    for subject, result, ok in findings:
        table.add_row(subject, result, {True: "ok", False: "WRONG", None: ""}[ok])
    Console().print(table)
    return int(any(ok is False for _, _, ok in findings))


def compare_devices() -> Iterator[Finding]:
    """Compare each accelerator with the CPU in what training runs there."""
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    if not devices:
        yield "device", "cpu; there is no other to compare with it", None
    for device in devices:
        for compare in (training_gaps, bf16_gaps):
            try:
                for what, gap, tolerance in compare(device):
                    result = f"{what} differ from the CPU's by at most {gap:.1e}"
                    yield device, result, gap <= tolerance
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                rejects_bf16 = isinstance(error, ConfigError) and compare is bf16_gaps
                yield device, f"{compare.__name__}: {reason}", None if rejects_bf16 else False


def training_gaps(device: str) -> Iterator[Gap]:
    """Compare a device's samples, and the objective of a policy that differs from its reference.

    Log-probs and values of the samples are recomputed on the CPU; gradients are relative to the
    largest.
    """
    args = RLHFArgs(
        preset="reel", batch_size=16, num_minibatches=1, gen_len=24, top_p=0.9, stop_at_eos=False,
        device=device,
    )  # fmt: skip
    trainer, generator = RLHFTrainer(args), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += NOISE * noise.to(parameter.device)
    (minibatch,) = ReplayMemory(trainer.rollout_phase(), 1, 1).get_minibatches(generator)
    results = []
    for place in (device, "cpu"):
        policy, reference = trainer.policy.to(place), trainer.reference.to(place)
        batch = minibatch.to(place)
        terms = objective_terms(policy, reference, batch, trainer.objective)
        terms.objective.backward()
        gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        results.append((terms.objective.detach(), torch.cat(gradients).cpu()))
        policy.zero_grad()
    gap = _largest_gap((batch.logprobs, terms.logprobs), (batch.values, terms.values))
    yield "log-probs and values of its samples", gap, 1e-3
    (objective, gradient), (expected, expected_gradient) = results
    gradients = [x / expected_gradient.abs().max() for x in (gradient, expected_gradient)]
    yield "objective and gradient", _largest_gap((objective, expected), gradients), 1e-3


@torch.no_grad()
def bf16_gaps(device: str) -> list[Gap]:
    """Compare final residuals in bf16 with the CPU's in fp32, relative to the largest."""
    validate_half_precision(torch.device(device), torch.bfloat16, "precision='bf16'")
    host, other = load_model("reel-nano"), load_model("reel-nano", device=device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(host.cfg.d_vocab, (8, 29), generator=generator)
    full = final_residuals(host, tokens)
    half = final_residuals(other, tokens.to(device), dtype=torch.bfloat16)
    return [("residuals in bf16", _largest_gap((half, full)) / full.abs().max().item(), 2e-2)]


def _largest_gap(*pairs: tuple[Tensor, Tensor]) -> float:
    """Return the largest absolute difference; nan if one of them is."""
    return torch.stack([(a.cpu() - b.cpu()).abs().max() for a, b in pairs]).max().item()
