"""KL attribution: hand-computed, complete, exact derivatives, injected changes, and padding."""

import pytest
import torch
from torch import Tensor

from rlhf_lab.diffing.groups import coarse_groups, fine_groups, restrict
from rlhf_lab.diffing.kl_attribution import kl_by_output, kl_by_weights
from rlhf_lab.diffing.weight_line import WeightLine
from rlhf_lab.functional import kl_per_token, log_probs


@pytest.fixture
def tokens(reviews) -> Tensor:
    return reviews[:4, :9]


def everywhere(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def exact_kl(base, tuned, tokens: Tensor) -> Tensor:
    return kl_per_token(*(log_probs(model(tokens).double()) for model in (tuned, base)))


def test_kl_by_output_matches_hand_computed():
    """Logits (h, 0), h from 0 to 2 by parts of 1/2 and 3/2, which share the KL as 1 to 3."""
    parts1 = torch.tensor([0.5, 1.5], dtype=torch.float64)[:, None, None]
    read = lambda h: torch.cat([h, torch.zeros_like(h)], -1)
    found = kl_by_output(0 * parts1, parts1, read, read)
    p = torch.sigmoid(torch.tensor(2.0).double())
    expected = (p * (2 * p).log() + (1 - p) * (2 * (1 - p)).log()).item()
    assert found.kl.item() == pytest.approx(expected, abs=1e-12) and found.read_out.item() == 0
    assert found.rows[:, 0].tolist() == pytest.approx([expected / 4, 3 * expected / 4], abs=1e-7)


@pytest.mark.slow
def test_weights_sum_to_the_kl_and_fine_groups_to_coarse_ones(base, far, tokens):
    line, fine, coarse = WeightLine(base, far), fine_groups(base), coarse_groups(base)
    by_fine = kl_by_weights(line, fine, tokens, everywhere(tokens), rows_at_once=2)
    kl = exact_kl(base, far, tokens).sum().item()
    assert by_fine.sum().item() == pytest.approx(kl, rel=1e-3)
    by_coarse = kl_by_weights(line, coarse, tokens, everywhere(tokens))
    parts = [i for i, name in enumerate(fine.names) if name.startswith(("L1H", "L1 ln1", "L1 b_O"))]
    whole = by_coarse[coarse.names.index("L1 attn")].sum().item()
    assert by_fine[parts].sum().item() == pytest.approx(whole, rel=1e-3)


def test_only_the_changed_mlp_has_kl_by_weights(base, make_tuned, tokens):
    tuned, groups = make_tuned(base, lambda n: "blocks.0.mlp" in n, size=1.0), coarse_groups(base)
    found = kl_by_weights(WeightLine(base, tuned), groups, tokens, everywhere(tokens))
    changed = {name for name, row in zip(groups.names, found, strict=True) if row.any()}
    assert changed == {"L0 mlp"} and found.sum() > 1e-3


def test_a_node_is_the_derivative_along_a_groups_change(base, tuned, tokens):
    groups, step, line = fine_groups(base), 1e-4, WeightLine(base, tuned, in_float64=True)
    found = kl_by_weights(line, groups, tokens, everywhere(tokens), nodes=1)
    middle, reference = line.at(0.5), log_probs(line.logits(line.before, tokens))
    for name in ("L0H1", "unembed"):
        ends = []
        for sign in (1, -1):
            moved = restrict(line.delta, groups, name)
            weights = middle | {n: middle[n] + sign * step * moved[n] for n in moved}
            ends.append(kl_per_token(log_probs(line.logits(weights, tokens)), reference).sum())
        expected = ((ends[0] - ends[1]) / (2 * step)).item()
        at = groups.names.index(name)
        assert found[at].sum().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_left_padding_and_masked_states_do_not_count(base, far, tokens):
    groups, line = coarse_groups(base), WeightLine(base, far)
    plain = kl_by_weights(line, groups, tokens, everywhere(tokens))
    shifted = torch.cat([torch.zeros_like(tokens[:, :3]), tokens], 1)
    real = torch.cat([torch.zeros_like(tokens[:, :3]), torch.ones_like(tokens)], 1).bool()
    padded = kl_by_weights(line, groups, shifted, real, real)
    torch.testing.assert_close(padded, plain, atol=1e-4, rtol=1e-4)
    at_two = kl_by_weights(line, groups, tokens, everywhere(tokens) & (torch.arange(9) == 2))
    expected = exact_kl(base, far, tokens)[:, 2].sum().item()
    assert at_two.sum().item() == pytest.approx(expected, rel=1e-3)
