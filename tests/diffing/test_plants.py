"""Plants: a read-out alone and one head alone, charged to the planted part by every method."""

import copy

import pytest
import torch

from rlhf_lab.diffing import (
    Groups,
    Side,
    fine_groups,
    graft,
    graft_groups,
    part_places,
    patch_activations,
    shift_by_weights,
    split_shift,
    transplant,
)
from rlhf_lab.diffing.effects import READ_OUT_PART, effects_of_parts, kendall_tau, layer_groups
from rlhf_lab.diffing.logit_shift import ends_of
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.models.residual_parts import SITES, residual_components
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.capture import capture_activations

WORDS, POS, HEAD = (5, 9), -3, "L0H2"
SPEC = SamplingSpec(gen_len=6)


def letters(texts):
    return torch.tensor([len(text) / 10 for text in texts])


@pytest.fixture(scope="module")
def far(base, make_tuned):
    return make_tuned(base, size=0.3)


@pytest.fixture(scope="module")
def wild(base, make_tuned):
    """A model so far away that a few samples differ."""
    return make_tuned(base, size=4.0)


@pytest.fixture(scope="module")
def read_out(base, far):
    return graft(base, far, lambda name: name.startswith(("ln_final.", "unembed.")))


@pytest.fixture(scope="module")
def one_head(base, far):
    return graft_groups(base, far, fine_groups(base), [HEAD])


@pytest.mark.slow
def test_a_read_out_alone_is_charged_to_the_read_out_by_every_method(base, read_out, wild, reviews):
    found = effects_of_parts(base, read_out, reviews[:4], POS, WORDS)
    names = layer_groups(base).names
    assert names[-1] == READ_OUT_PART
    shift = found["by weights"].sum(0)
    assert shift.abs().max() > 0.05
    for method, rows in found.items():
        assert not rows[:-1].any(), method
        if method != "inherited":
            torch.testing.assert_close(rows[-1], shift, atol=1e-4, rtol=0)
    other = graft(base, wild, lambda name: name.startswith(("ln_final.", "unembed.")))
    moved = transplant(base, other, layer_groups(base), letters, 8, 2, spec=SPEC)
    for effect in (moved.put_in(), moved.taken_out(), moved.shapley()):
        assert not effect.value[:-1].any() and effect.value[-1] != 0


def test_one_head_alone_is_charged_to_the_head_by_split_patch_and_weights(base, one_head, reviews):
    tokens = reviews[:4]
    models = base, one_head
    acts = tuple(capture_activations(model, tokens, SITES, POS) for model in models)
    causes = split_shift(*ends_of(models, acts, tokens, POS, WORDS), is_centered(base.ln_final))
    components = residual_components(base, acts[0])[0]
    own = dict(zip(components, causes.own_weights, strict=False))
    assert {name for name, row in own.items() if row.any()} == {HEAD}
    assert not causes.read_out.any()
    weights = shift_by_weights(base, one_head, tokens, POS, WORDS, fine_groups(base))
    by_name = dict(zip(fine_groups(base).names, weights.tolist(), strict=True))
    assert {name for name, value in by_name.items() if value} == {HEAD}
    # at all positions, the head's output brings all of the shift, and takes it away again
    sides = Side(base, tokens), Side(one_head, tokens)
    for receiver, donor in (sides, sides[::-1]):
        found = patch_activations(receiver, donor, part_places(base), POS, WORDS)
        row = found.patched[found.names.index(HEAD)]
        torch.testing.assert_close(row, found.end, atol=1e-4, rtol=0)
        earlier = [found.names.index(name) for name in ("embed", "pos_embed", "L0H0", "L0H3")]
        torch.testing.assert_close(
            found.patched[earlier], found.start.expand(4, -1), atol=1e-5, rtol=0
        )


def test_one_head_alone_earns_all_of_the_reward(base, wild):
    one_head = graft_groups(base, wild, fine_groups(base), [HEAD])
    fine = fine_groups(base)
    rest = [part for name in fine.names for part in fine.of(name) if name not in (HEAD, "L1H0")]
    groups = Groups(["L1H0", HEAD, "rest"], [fine.of("L1H0"), fine.of(HEAD), rest])
    found = transplant(base, one_head, groups, letters, 8, 2, spec=SPEC)
    assert found.gain.any()
    torch.testing.assert_close(found.shapley().value[1], found.gain.double().mean())
    assert found.shapley().value[[0, 2]].tolist() == [0, 0]


@pytest.mark.slow
def test_effects_of_all_parts_sum_where_the_method_sums(base, far, reviews):
    found = effects_of_parts(base, far, reviews[:4], POS, WORDS)
    logits = [model(reviews[:4])[:, POS].double() for model in (base, far)]
    moved = logits[1] - logits[0]
    shift = moved[:, WORDS[0]] - moved[:, WORDS[1]]
    torch.testing.assert_close(found["by weights"].sum(0), shift, atol=1e-3, rtol=0)
    into = found["patched in"]
    last = copy.deepcopy(base)
    last.ln_final, last.unembed = far.ln_final, far.unembed
    swapped = last(reviews[:4])[:, POS].double() - logits[0]
    torch.testing.assert_close(into[-1], swapped[:, WORDS[0]] - swapped[:, WORDS[1]])


def test_orders_agree_by_hand():
    """Of three pairs, two stand in one order and one in the other: (2 - 1) / 3."""
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0])
    assert kendall_tau(first, second).item() == pytest.approx(1 / 3)
    assert kendall_tau(first, first).item() == 1 and kendall_tau(first, -first).item() == -1
    tied = torch.tensor([1.0, 1.0, 2.0])
    assert kendall_tau(first, tied).item() == pytest.approx(2 / 3)
    both = kendall_tau(torch.stack([first, first]), torch.stack([second, first]))
    assert both.tolist() == pytest.approx([1 / 3, 1])
    assert kendall_tau(torch.ones(1), torch.ones(1)).isnan()
