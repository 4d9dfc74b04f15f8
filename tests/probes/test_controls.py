"""Labels of a control task: one per word type, of the chosen share, and what a probe reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.probes import control_labels
from rlhf_lab.probes.direction import accuracy, fit_direction, project


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_by_hand():
    """Of two types at a half, one is True; of three at 0.9, not all three."""
    found = control_labels(torch.tensor([7, 7, 3, 7, 3]), seeded(0))
    assert found.tolist() in ([True, True, False, True, False], [False, False, True, False, True])
    assert control_labels(torch.tensor([1, 2, 3]), seeded(0), 0.9).sum() == 2
    assert control_labels(torch.tensor([1, 2, 3]), seeded(0), 0.01).sum() == 1


tokens = st.lists(st.integers(0, 30), min_size=2, max_size=40).filter(lambda x: len(set(x)) > 1)


@given(tokens, st.floats(0.05, 0.95), st.integers(0, 10**6))
def test_a_word_has_one_label_wherever_it_stands(row, share, seed):
    found = control_labels(torch.tensor(row), seeded(seed), share)
    by_type = {}
    for token, label in zip(row, found.tolist(), strict=True):
        assert by_type.setdefault(token, label) == label
    wanted = min(max(round(share * len(by_type)), 1), len(by_type) - 1)
    assert sum(by_type.values()) == wanted and found.dtype == torch.bool


def test_every_type_is_as_often_true_as_any_other():
    row = torch.arange(6)
    drawn = torch.stack([control_labels(row, seeded(seed), 1 / 3) for seed in range(900)]).double()
    assert (drawn.mean(0) - 1 / 3).abs().max() < 4 * (2 / 9 / 900) ** 0.5
    assert torch.equal(drawn.sum(1), torch.full((900,), 2.0).double())


def test_only_the_generator_is_drawn_from_and_the_shape_is_kept():
    rows = torch.randint(9, (4, 5), generator=seeded(0))
    state, generator = torch.random.get_rng_state(), seeded(1)
    first, second = (control_labels(rows, generator) for _ in "12")
    assert torch.equal(first, control_labels(rows, seeded(1))) and first.shape == rows.shape
    assert not torch.equal(first, second) and torch.equal(state, torch.random.get_rng_state())
    assert control_labels(rows.int(), seeded(1)).equal(first)


def test_a_probe_memorises_few_words_and_not_words_that_it_has_not_seen():
    """With words it has seen, a probe is right about a label that means nothing; else at chance."""
    generator = seeded(2)
    n_types, d_model = 40, 60
    vectors = torch.randn(n_types, d_model, generator=generator)
    words = torch.arange(n_types).repeat(10)
    x = vectors[words] + 0.1 * torch.randn(len(words), d_model, generator=generator)
    seen, unseen = [], []
    for _ in range(20):
        labels = control_labels(words, generator)
        for is_fit, found in ((torch.arange(len(words)) < 200, seen), (words < 30, unseen)):
            reader = fit_direction(x[is_fit], labels[is_fit])
            held = project(x[~is_fit], reader.direction)
            found.append(accuracy(held, reader.threshold, labels[~is_fit]).item())
    assert sum(seen) / 20 > 0.85
    # 10 unseen types in each of 20 draws: 0.035 is the standard error of 200 coins
    assert abs(sum(unseen) / 20 - 0.5) < 4 * 0.035


@pytest.mark.parametrize(
    ("row", "share", "says"),
    [([4, 4], 0.5, "1 word types"), ([], 0.5, "0 word types"), ([1, 2], 1.0, "share is 1.0")],
)
def test_what_cannot_have_both_labels_is_refused(row, share, says):
    with pytest.raises(ValueError, match=says):
        control_labels(torch.tensor(row, dtype=torch.long), seeded(0), share)
