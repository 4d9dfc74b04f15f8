"""Amnesic probing: what erasure leaves of a decision, on a policy whose mechanism is known."""

import pytest
import torch

from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.probes.amnesic import Decided, decide_without, erasing, forgotten
from rlhf_lab.probes.erasure import Eraser, fit_leace
from rlhf_lab.training.capture import Where, capture_activations

SITE = "blocks.0.hook_resid_mid"
WORDS = (3, 4)


@pytest.fixture(scope="module")
def policy() -> TransformerWithValueHead:
    return TransformerWithValueHead(toy_transformer(), seed=0)


@pytest.fixture(scope="module")
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences whose token at position 1 is the label; the others are drawn at random."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (1200, 4), generator=generator)
    labels = torch.rand(1200, generator=generator) > 0.5
    tokens[:, 1] = torch.where(labels, 7, 8)
    return tokens, labels


def leace(policy, tokens, labels) -> Eraser:
    x = capture_activations(policy, tokens, [SITE])[SITE].transpose(0, 1)
    return fit_leace(x, labels)


def test_leace_blinds_a_refitted_reader_and_nothing_erased_changes_nothing(policy, text):
    tokens, labels = text
    seen = tokens[600:], labels[600:], SITE, 1, WORDS
    before = decide_without(policy, *seen)
    same = forgotten(before, before)
    assert same.gap.value == 1 and same.flipped.value == 0 and same.gap.n == 300
    assert same.read_there.value == 1
    eraser = leace(policy, tokens[:600], labels[:600])
    left = forgotten(decide_without(policy, *seen, eraser), before)
    # no line tells the classes apart at the site; the MLP behind it is no line, and does
    assert abs(left.read_there.value - 0.5) < 0.1 and 0.6 < left.read_last.value < 0.9
    assert abs(left.gap.value) < 0.15


def test_each_position_goes_through_its_own_eraser(policy, text):
    """An eraser of position 0 alone leaves what position 1 says of itself."""
    tokens, labels = text
    seen = tokens[600:], labels[600:], SITE, 1, WORDS
    whole = leace(policy, tokens[:600], labels[:600])
    first = Eraser(*(part[:1] for part in whole))
    left = forgotten(decide_without(policy, *seen, first), decide_without(policy, *seen))
    assert left.read_there.value == 1 and abs(left.gap.value - 1) < 0.05


def test_the_share_that_is_left_and_the_flips_by_hand():
    positive = torch.tensor([True, True, False, False])
    right = torch.tensor([True, True, False, True])
    before = Decided(torch.tensor([3.0, 1.0, -1.0, -1.0]), positive, right, right)
    after = Decided(torch.tensor([2.0, -1.0, -1.0, 0.5]), positive, right, right)
    left = forgotten(after, before)
    # (0.5 - -0.25) / (2 - -1), and two of four change sides
    assert left.gap.value.item() == pytest.approx(0.25)
    assert left.flipped.value == 0.5 and left.read_there.value == 0.75


def test_the_intervention_erases_single_states_at_the_position_they_come_at():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 5, 4, generator=generator)
    eraser = Eraser(*torch.randn(3, 4, 4, generator=generator).double())
    erase, where = erasing(eraser), Where(0, "rollout", SITE)
    expected = erase(whole, where)
    assert torch.equal(expected[:, 4], whole[:, 4]) and not torch.equal(expected[:, 3], whole[:, 3])
    for _ in range(2):  # a second batch begins at the prompt again
        pieces = [whole[:, :2], *(whole[:, i : i + 1] for i in range(2, 5))]
        assert torch.equal(torch.cat([erase(piece, where) for piece in pieces], 1), expected)
