"""Grafts, truncated changes and the line between two models, with ends that hold bit for bit."""

import copy
import math

import pytest
import torch

from rlhf_lab.diffing import fine_groups, graft, graft_groups, path, truncate, truncate_delta
from rlhf_lab.diffing.weights import as_matrix, leading_fraction, truncations
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import add_lora, effective_weights, same_weights


def copied(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_graft_has_the_chosen_weights_and_no_others(base, tuned, reviews):
    states = copied(base), copied(tuned)
    grafted = graft(base, tuned, lambda name: name.startswith("unembed."))
    for name, weight in grafted.named_parameters():
        source = tuned if name.startswith("unembed.") else base
        assert torch.equal(weight, source.get_parameter(name))
        assert weight.data_ptr() not in (
            base.get_parameter(name).data_ptr(),
            tuned.get_parameter(name).data_ptr(),
        )
    # the read-out acts on the base's own last residual
    residual = base(reviews, stop_at_layer=2)
    torch.testing.assert_close(grafted(reviews), tuned.unembed(base.ln_final(residual)))
    with torch.no_grad():
        grafted.embed.W_E += 1
    assert unchanged(base, states[0]) and unchanged(tuned, states[1])
    assert same_weights(graft(base, tuned, lambda name: True), tuned)
    with pytest.raises(ConfigError, match="belongs is False"):
        graft(base, tuned, lambda name: False)
    source = copy.deepcopy(base)
    source.add_hook("blocks.0.hook_mlp_out", lambda act, hook: act * 0)
    unhooked = graft(source, tuned, lambda name: "ln_final" in name)
    assert not any(point.fwd_hooks for point in unhooked.hook_dict.values())


def test_a_head_is_grafted_alone(base, tuned):
    before = copied(base)
    grafted = graft_groups(base, tuned, fine_groups(base), ["L1H2"])
    assert unchanged(base, before)
    for name, weight in grafted.named_parameters():
        own, other = base.get_parameter(name), tuned.get_parameter(name)
        by_head = name.startswith("blocks.1.attn") and not name.endswith("b_O")
        rows = range(len(weight)) if by_head else [...]
        for row in rows:
            assert torch.equal(weight[row], (other if by_head and row == 2 else own)[row])
    assert same_weights(graft_groups(base, tuned, fine_groups(base), []), base)


def test_adapters_are_grafted_as_what_they_make_of_the_weights(base, make_tuned):
    adapted = make_tuned(base, lambda name: False)
    add_lora(adapted, rank=2, alpha=4.0, targets=("W_V",))
    with torch.no_grad():
        adapted.blocks[0].attn.parametrizations["W_V"][0].B += 0.3
    assert fine_groups(adapted) == fine_groups(base)
    both = graft(base, adapted, lambda name: True), graft(adapted, base, lambda name: "W_V" in name)
    assert same_weights(both[0], adapted) and same_weights(both[1], base)
    assert not any("parametrizations" in name for name, _ in both[1].named_parameters())
    assert not any(weight.requires_grad for weight in both[1].parameters())
    torch.testing.assert_close(*(model(torch.tensor([[1, 2, 3]])) for model in (both[0], adapted)))


def test_a_change_of_two_directions_by_hand():
    """The change is 3 along (row 0, column 0) and 2 along (row 1, column 2)."""
    before = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    after = torch.tensor([[4.0, 2.0, 3.0], [4.0, 5.0, 8.0]])
    kept = torch.tensor([[4.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    torch.testing.assert_close(truncate_delta(before, after, 1), kept)
    assert torch.equal(truncate_delta(before, after, 0), before)
    assert torch.equal(truncate_delta(before, after, 2), after)
    assert torch.equal(truncate_delta(before, after, 9), after)
    assert torch.equal(truncate_delta(before, before, 1), before)
    with pytest.raises(ConfigError, match="rank=-1"):
        truncate_delta(before, after, -1)


def test_every_matrix_moves_by_the_rank_and_vectors_move_whole(base, tuned):
    cut, none = truncations(base, tuned, [3, 0])
    for name, weight in effective_weights(cut).items():
        before, after = base.get_parameter(name), tuned.get_parameter(name)
        moved = as_matrix(name, weight.double() - before.double())
        if min(moved.shape) == 1:
            assert torch.equal(weight, after), name
            continue
        whole = torch.linalg.svdvals(as_matrix(name, after.double() - before.double()))
        found = torch.linalg.svdvals(moved)
        torch.testing.assert_close(found[:3], whole[:3], rtol=1e-4, atol=1e-6)
        assert found[3:].max() < 1e-5, name
    assert same_weights(truncate(base, tuned, 10_000), tuned)
    assert torch.equal(none.W_Q, base.W_Q) and torch.equal(none.ln_final.w, tuned.ln_final.w)


def test_leading_fraction_matches_hand_computed():
    """The squares of the change sum to 91; singular vectors are the axes."""
    weight = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    delta = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for k, inside in ((1, 1), (2, 1 + 4 + 16 + 25)):
        assert leading_fraction(delta, weight, k) == pytest.approx(inside / 91)
        assert leading_fraction(delta.T, weight.T, k) == pytest.approx(inside / 91)
    assert math.isnan(leading_fraction(0 * delta, weight, 1))


def test_the_line_goes_through_both_models_bit_for_bit(base, tuned, reviews):
    found = list(path(base, tuned, [0, 1, 0.25, 0.75, 2.0, -0.5]))
    assert same_weights(found[0], base) and same_weights(found[1], tuned)
    for model, alpha in zip(found[2:], [0.25, 0.75, 2.0, -0.5], strict=True):
        for name, weight in model.named_parameters():
            before, after = base.get_parameter(name).double(), tuned.get_parameter(name).double()
            torch.testing.assert_close(
                weight.double(), before * (1 - alpha) + after * alpha, rtol=0, atol=1e-6
            )
    assert torch.equal(found[0](reviews), base(reviews))
    assert not list(path(base, tuned, []))
    with pytest.raises(ConfigError, match="alphas must be finite, got nan"):
        list(path(base, tuned, [math.nan]))
