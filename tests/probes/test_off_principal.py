"""OffPrincipal: hand-computed fractions, random changes, a run."""

import re

import pytest
import torch

from rlhf_lab.diffing.weights import as_matrix
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import effective_weights
from rlhf_lab.probes import OffPrincipal
from rlhf_lab.probes.off_principal import (
    Factored,
    chance_share,
    energy_blocks,
    principal_spaces,
    product_spaces,
    random_factor_shares,
    random_shares,
)
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.looking import Trained, sound

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def test_energy_blocks_match_hand_computed():
    diagonal = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    wide, tall = principal_spaces(diagonal, 1), principal_spaces(diagonal.T, 1)
    assert [x.abs().flatten().tolist() for x in wide] == [[1, 0], [1, 0, 0]]
    assert [x.abs().flatten().tolist() for x in tall] == [[1, 0, 0], [1, 0]]
    # squares 1, 4, 9 in the first row and 16, 25, 36 in the second: 91 in total
    delta = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    blocks = energy_blocks(delta, wide) * 91
    assert blocks.tolist() == [pytest.approx([1, 4 + 9]), pytest.approx([16, 25 + 36])]
    assert energy_blocks(torch.zeros(2, 3), wide).isnan().all()


def mean_and_error(draws: torch.Tensor) -> tuple[float, float]:
    return draws.mean().item(), draws.std().item() / len(draws) ** 0.5


@pytest.mark.parametrize("rank", [1, 9])
def test_random_changes_match_expected_fraction(rank):
    generator = torch.Generator().manual_seed(3)
    delta = torch.randn(15, rank, generator=generator) @ torch.randn(rank, 9, generator=generator)
    mean, error = mean_and_error(random_shares(delta, 3, 600, generator))
    expected = chance_share(15, 9, 3)
    assert expected == 9 / (15 * 9) and abs(mean - expected) < 4 * error < 0.4 * expected


def test_random_changes_of_one_factor_stay_in_the_other():
    """With A of 2 columns and k = 2, A dB is inside on the left; on the right, 2/9 on average."""
    generator = torch.Generator().manual_seed(4)
    A, B, dB = (
        torch.randn(shape, generator=generator).double() for shape in ((15, 2), (2, 9), (2, 9))
    )
    before, after = Factored(A, B), Factored(A, B + 0.01 * dB)
    spaces = product_spaces(before, 2)
    mean, error = mean_and_error(random_factor_shares(before, after, spaces, 600, generator))
    assert abs(mean - 2 / 9) < 4 * error < 0.2
    assert energy_blocks(before.product(), spaces)[0, 0] == pytest.approx(1)


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
        assert row in matrices or draws.mean() > 2 * by_size  # see `random_factor_shares`
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


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_with_and_without):
    run = run_with_and_without(OffPrincipal(every=1), total_phases=1, warmup_steps=0)
    first, last = run.records("off_principal")
    assert first["share"] is None and last["share"] > 0
    html = probe_html(run, "off_principal")
    assert html.count("<figure") == 3 and "n = 20 draws" in html


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="k=0"):
        OffPrincipal(k=0)
    with pytest.raises(ConfigError, match="draws=0"):
        OffPrincipal(draws=0)
