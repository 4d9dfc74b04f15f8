import pytest
import torch

from rlhf_lab.probes.weight_delta import (
    as_matrix,
    describe_delta,
    describe_spectrum,
    unchanged_fraction,
)


def test_weight_that_was_0_has_no_relative_change():
    row = describe_delta("b", torch.zeros(3), torch.ones(3))
    assert row["relative"] is None and row["norm"] == pytest.approx(3**0.5)
    assert describe_delta("b", torch.ones(3), torch.full((3,), 3.0))["relative"] == 2.0


@pytest.mark.parametrize("name", ["unembed.W_U", "blocks.0.attn.W_O", "blocks.0.attn.W_Q"])
def test_changes_have_the_singular_values_of_torch(model, name):
    weight = dict(model.named_parameters())[name].detach()
    delta = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
    row, same = (describe_delta(name, weight, x) for x in (weight + delta, weight))
    s = torch.linalg.svdvals(as_matrix(name, delta).double())
    assert row["s"] == pytest.approx(s[: len(row["s"])].tolist(), rel=1e-4)
    assert row["norm"] == pytest.approx(delta.norm().item(), rel=1e-4)
    assert row["stable_rank"] == pytest.approx((s.square().sum() / s[0] ** 2).item(), rel=1e-4)
    assert row["energy_error"] < 1e-9
    assert (same["norm"], same["stable_rank"], same["unchanged"]) == (0, 0, 1)


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
