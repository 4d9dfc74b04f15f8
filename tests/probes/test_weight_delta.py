import copy
import math

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models import HookedTransformer
from rlhf_lab.probes.weight_delta import (
    as_matrix,
    describe_delta,
    describe_spectrum,
    unchanged_fraction,
)


def with_planted_delta(
    model: HookedTransformer, parameter: str, rank: int, size: float, seed: int
) -> tuple[HookedTransformer, Float[Tensor, "rows cols"]]:
    """Return a copy of a model with a change of rank `rank` in one matrix, and the change.

    All singular values of the change are equal, and its norm is `size`.
    """
    planted = copy.deepcopy(model)
    weight = dict(planted.named_parameters())[parameter]
    rows, cols = as_matrix(parameter, weight.detach()).shape
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(cols, rank, generator=generator, dtype=torch.float64))
    delta = (left @ right.T * size / math.sqrt(rank)).to(weight)
    with torch.no_grad():
        weight += delta.reshape(weight.shape)
    return planted, delta


def test_weight_that_was_0_has_no_relative_change():
    row = describe_delta("b", torch.zeros(3), torch.ones(3))
    assert row["relative"] is None and row["norm"] == pytest.approx(3**0.5)
    assert describe_delta("b", torch.ones(3), torch.full((3,), 3.0))["relative"] == 2.0


@pytest.mark.parametrize("rank, k90", [(1, 1), (3, 3)])
@pytest.mark.parametrize("name", ["unembed.W_U", "blocks.0.attn.W_O", "blocks.1.mlp.W_in"])
def test_a_planted_delta_is_recovered(model, name, rank, k90):
    planted, delta = with_planted_delta(model, name, rank, size=2.0, seed=0)
    names = [name, "blocks.0.mlp.W_out"]
    weights = [dict(m.named_parameters()) for m in (model, planted)]
    row, untouched = (describe_delta(n, *(each[n].detach() for each in weights)) for n in names)
    assert delta.norm().item() == pytest.approx(2.0, rel=1e-5)
    assert row["norm"] == pytest.approx(2.0, rel=1e-4)
    assert row["stable_rank"] == pytest.approx(rank, rel=1e-3) and row["k90"] == k90
    # rank equal singular values, each 2 / sqrt(rank)
    assert row["s"][:rank] == pytest.approx([2 / rank**0.5] * rank, rel=1e-4)
    assert row["energy_error"] < 1e-9
    assert (untouched["norm"], untouched["stable_rank"], untouched["unchanged"]) == (0, 0, 1)


def test_stable_rank_and_energy_by_hand():
    # energies 9, 1, 0: stable rank 10 / 9; the first holds exactly 90 %.
    assert describe_spectrum(torch.tensor([3.0, 1.0, 0.0])) == (pytest.approx(10 / 9), 1)
    # energies 4, 4, 4, 4: 90 % needs all four.
    assert describe_spectrum(torch.full((4,), 2.0)) == (4.0, 4)
    assert describe_spectrum(torch.zeros(3)) == (0.0, 0)


def test_rounding_hides_small_changes():
    before = torch.tensor([1.0, 1.0, 1.0, 1.0])
    after = torch.tensor([1.0, 1.0001, 1.1, 2.0])
    # bfloat16 keeps 8 bits: 1.0001 rounds to 1.
    assert unchanged_fraction(before, after) == (0.25, 0.5)


def test_heads_are_laid_side_by_side():
    q = torch.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    assert as_matrix("blocks.0.attn.W_Q", q)[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert as_matrix("blocks.0.attn.W_O", q).shape == (6, 4)
    for name in ("b_Q", "b_K", "_b_K"):  # one vector, also where heads share it
        assert as_matrix(f"blocks.0.attn.{name}", q[0]).shape == (1, 12)
    assert as_matrix("ln_final.w", q[0, 0]).shape == (1, 4)
