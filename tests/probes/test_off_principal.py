"""OffPrincipal: fractions of planted changes, a run that is left alone, and injected faults."""

import re

import pytest
import torch

from rlhf_lab.diffing.weights import as_matrix
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import effective_weights
from rlhf_lab.probes import OffPrincipal
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.looking import Trained, sound
from tests.probes.planting import assert_fault_fails

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def named_matrix(name: str, model) -> torch.Tensor:
    """Return the matrix that a row names; grouped heads have copies of shared weights."""
    product = re.fullmatch(r"L(\d+)H(\d+) (OV|QK)", name)
    if product is None:
        return as_matrix(name, effective_weights(model)[name]).double()
    attn, head = model.blocks[int(product[1])].attn, int(product[2])
    pair = (attn.W_V, attn.W_O) if product[3] == "OV" else (attn.W_Q, attn.W_K.mT)
    return pair[0][head].double() @ pair[1][head].double()


@torch.no_grad()
def check(kind: str, run: Trained) -> None:
    """Compare norms and fractions with projections on singular vectors of each matrix."""
    record = sound(run, OffPrincipal(k=4, draws=4))
    rows, models = record.values["rows"], (run.ctx.reference, run.ctx.policy.base_model)
    heads = models[0].cfg.n_layers * models[0].cfg.n_heads
    assert sum(row["name"].endswith((" OV", " QK")) for row in rows) == 2 * heads
    assert any(row["share"] is not None for row in rows)
    matrices = [row for row in rows if not row["name"].endswith((" OV", " QK"))]
    weights = torch.tensor([row["norm"] for row in matrices]).square().double()
    shares = torch.tensor([row["share"] or 0.0 for row in matrices]).double()
    whole = (weights @ shares / weights.sum()).item()
    assert record.values["share"] == pytest.approx(whole, rel=1e-4)
    for row, draws in zip(rows, record.tensors["draws"], strict=True):
        before, after = (named_matrix(row["name"], model) for model in models)
        delta = after - before
        energy = delta.square().sum()
        assert row["norm"] == pytest.approx(energy.sqrt().item(), rel=1e-5)
        if row["share"] is None or row["own"] is None:
            continue
        assert row["k"] == min(4, *delta.shape)
        assert (row["low"], row["high"]) == (draws.min().item(), draws.max().item())
        by_size = row["k"] ** 2 / delta.numel()
        chance = by_size if row in matrices else draws.mean().item()
        assert row["times"] * chance == pytest.approx(row["share"])
        u, _, vh = torch.linalg.svd(before, full_matrices=False)
        left = u[:, : row["k"]].T @ delta
        right = delta @ vh[: row["k"]].T
        inside = left @ vh[: row["k"]].T
        found = [x.square().sum() / energy for x in (left, right, inside)]
        stored = [row["left"], row["right"], row["share"]]
        assert stored == pytest.approx([x.item() for x in found], abs=1e-4), row["name"]
    if kind == "adapted":  # W_out and the embeddings are frozen
        assert all(r["times"] is None for r in rows if r["name"].endswith(("W_out", "embed.W_E")))


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_shares_are_those_of_singular_vectors(kind, trained_runs):
    check(kind, trained_runs(kind))


PRINCIPAL, CHANGES = "diffing.principal", "off_principal:OffPrincipal._changes"
FAULTS = [
    ("padded", f"{PRINCIPAL}:principal_spaces", "[1][:, :k]", "[1][:, -k:]"),
    ("padded", f"{PRINCIPAL}:energy_blocks", ".reshape(2, 2)", ".reshape(2, 2).T"),
    ("padded", CHANGES, "exact(others[name]) - base", "0.5 * (exact(others[name]) - base)"),
    (
        "grouped",
        f"{PRINCIPAL}:head_products",
        'shared = head * len(W["W_K"]) // len(W["W_Q"])',
        "shared = 0",
    ),
]


@pytest.mark.parametrize(("kind", "where", "old", "new"), FAULTS)
def test_injected_fault_fails(kind, where, old, new, trained_runs):
    run = trained_runs(kind)
    assert_fault_fails(where, old, new, lambda: check(kind, run))


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_beside_one_without):
    run = run_beside_one_without(OffPrincipal(every=1), total_phases=1, warmup_steps=0)
    first, last = run.records("off_principal")
    assert first["share"] is None and last["share"] > 0
    html = probe_html(run, "off_principal")
    assert html.count("<figure") == 3 and "n = 20 draws" in html


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="k=0"):
        OffPrincipal(k=0)
    with pytest.raises(ConfigError, match="draws=0"):
        OffPrincipal(draws=0)
