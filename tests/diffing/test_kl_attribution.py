"""KL attribution: hand-computed, complete, exact derivatives, injected changes, and padding."""

import pytest
import torch
from torch import Tensor

from rlhf_lab.diffing.groups import coarse_groups, fine_groups, restrict
from rlhf_lab.diffing.kl_attribution import kl_by_output, kl_by_weights
from rlhf_lab.diffing.weight_line import WeightLine, quadrature
from rlhf_lab.functional import kl_per_token, log_probs


@pytest.fixture
def tokens(reviews) -> Tensor:
    return reviews[:4, :9]


def everywhere(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def test_kl_by_output_matches_hand_computed(monkeypatch):
    """Logits (2 h, 0), h from 0 to 1 by parts of 1/4 and 3/4, which split the KL as 1 to 3."""
    parts1 = torch.tensor([0.25, 0.75], dtype=torch.float64)[:, None, None]
    read = lambda h: torch.cat([h, torch.zeros_like(h)], -1)
    found = kl_by_output(0 * parts1, parts1, read, lambda h: read(2 * h))
    few = kl_by_output(0 * parts1, parts1, read, lambda h: read(2 * h), nodes=1)
    torch.testing.assert_close(few.rows, found.rows, rtol=1e-3, atol=0)
    p = torch.sigmoid(torch.tensor(2.0).double())
    expected = (p * (2 * p).log() + (1 - p) * (2 * (1 - p)).log()).item()
    assert found.kl.item() == pytest.approx(expected, abs=1e-12) and found.read_out.item() == 0
    assert found.rows[:, 0].tolist() == pytest.approx([expected / 4, 3 * expected / 4], abs=1e-7)
    # rounding of a small KL in float32 does not double the nodes
    nodes, noise = {8: quadrature(8)}, torch.randn(3, 20, 8)
    monkeypatch.setattr("rlhf_lab.diffing.weight_line.quadrature", nodes.__getitem__)
    kl_by_output(noise, noise + 1e-3 * noise.flip(1), torch.clone, torch.clone)


def test_a_node_is_the_derivative_along_a_groups_change(base, tuned, tokens, monkeypatch):
    monkeypatch.setattr("rlhf_lab.diffing.weight_line.MAX_NODES", 1)
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
        assert found[groups.names.index(name)].sum().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_left_padding_and_masked_states_do_not_count(base, far, tokens):
    groups, line = coarse_groups(base), WeightLine(base, far)
    plain = kl_by_weights(line, groups, tokens, everywhere(tokens))
    shifted = torch.cat([torch.zeros_like(tokens[:, :3]), tokens], 1)
    real = torch.cat([torch.zeros_like(tokens[:, :3]), torch.ones_like(tokens)], 1).bool()
    padded = kl_by_weights(line, groups, shifted, real, real)
    torch.testing.assert_close(padded, plain, atol=1e-4, rtol=1e-4)
    at_two = kl_by_weights(line, groups, tokens, everywhere(tokens) & (torch.arange(9) == 2))
    exact = kl_per_token(*(log_probs(model(tokens).double()) for model in (far, base)))
    few = kl_by_weights(line, groups, tokens, everywhere(tokens), nodes=1)  # doubled
    assert few.sum().item() == pytest.approx(exact.sum().item(), rel=2e-3)
    expected = exact[:, 2].sum().item()
    assert at_two.sum().item() == pytest.approx(expected, rel=1e-3)
