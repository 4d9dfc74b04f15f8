"""KLAttribution: both sums on runs of every kind."""

import functools

import pytest
import torch
from numpy.polynomial.legendre import leggauss

from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.probes import KLAttribution
from rlhf_lab.probes.text_rows import text_rows
from tests.probes.looking import Trained, row_alone, sound

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def probe_of(kind: str) -> KLAttribution:
    return KLAttribution(n=8, text="rollout" if kind == "padded" else "eval")


def component_output(model, cache, name: str) -> torch.Tensor:
    """Return the output of a component in one text."""
    if name == "embed":
        return cache["hook_embed"][0]
    layer, part = name[1], name[2:].strip()
    if part == "mlp":
        return cache[f"blocks.{layer}.hook_mlp_out"][0]
    head = int(part[1:])
    z = cache[f"blocks.{layer}.attn.hook_z"][0, :, head]
    return z @ model.blocks[int(layer)].attn.W_O[head]


def kl_of_residuals(models, before: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Return the KL of the policy at a last residual from the reference at another one."""
    read = lambda model, x: log_probs(model.unembed(model.ln_final(x[None])))[0]
    return kl_per_token(read(models[1], h), read(models[0], before).detach())


def check(kind: str, run: Trained) -> None:
    """Compare rows of two texts with an integral by autograd, and positions with forward passes."""
    probe = probe_of(kind)
    record = sound(run, probe)
    values, stored = record.values, record.tensors
    rows, models = (
        text_rows(run.seen(), probe.text, 8),
        (run.ctx.reference, run.ctx.policy.base_model),
    )
    last = f"blocks.{models[0].cfg.n_layers - 1}.hook_resid_post"
    by_position, sizes = torch.zeros(stored["by_position"].shape[1]), []
    for row in range(len(rows.tokens)):
        tokens, states = row_alone(rows, row)
        with torch.no_grad():
            caches = [model.run_with_cache(tokens)[1] for model in models]
        h = [cache[last][0] for cache in caches]
        kl = functools.partial(kl_of_residuals, models, h[0])
        by_position[: len(states)] += kl(h[1]).detach() * states / len(rows.tokens)
        sizes.append(kl(h[1]).detach()[states].sum())
        if row > 1:
            continue
        slope = torch.zeros_like(h[0])
        for node, weight in zip(*leggauss(16), strict=True):
            at = (h[0] + (node + 1) / 2 * (h[1] - h[0])).requires_grad_()
            slope += weight / 2 * torch.autograd.grad(kl(at)[states].sum(), at)[0]
        of_read_out = kl(h[0]).detach()[states].sum()
        expected = {"read-out": of_read_out}
        for name in ("embed", "L0H1", "L1H0", "L0 mlp", "L1 mlp"):
            before, after = map(component_output, models, caches, (name, name))
            expected[name] = (slope * (after - before)).sum()
        for name, found in expected.items():
            column = stored["output"][values["components"].index(name), row]
            assert column.item() == pytest.approx(
                found.item(), abs=2e-3 * sizes[row].item() + 1e-5
            ), name
    torch.testing.assert_close(stored["by_position"].sum(0), by_position, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(stored["kl"], torch.stack(sizes), atol=1e-4, rtol=1e-3)
    assert values["kl"] == pytest.approx(stored["kl"].mean().item(), abs=1e-5)
    weights = stored["weights"].sum(1) / len(rows.tokens)
    assert values["weights"] == pytest.approx(weights.tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_rows_are_integrals_along_the_residual_stream(kind, trained_runs):
    check(kind, trained_runs(kind))
