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
    """The coins are the generator's numbers below the share, for the types in rising order."""
    tokens = torch.tensor([7, 7, 3, 7, 12, 3])
    three, seven, twelve = (torch.rand(3, generator=seeded(0)) < 0.4).tolist()
    found = control_labels(tokens, seeded(0), 0.4)
    assert found.tolist() == [seven, seven, three, seven, twelve, three]


tokens = st.lists(st.integers(0, 30), max_size=40)


@given(tokens, st.floats(0.05, 0.95), st.integers(0, 10**6))
def test_a_word_has_one_label_wherever_it_stands(row, share, seed):
    found = control_labels(torch.tensor(row, dtype=torch.long), seeded(seed), share)
    by_type = {}
    for token, label in zip(row, found.tolist(), strict=True):
        assert by_type.setdefault(token, label) == label
    assert found.dtype == torch.bool and len(found) == len(row)


def test_types_are_true_as_often_as_asked_and_independently():
    generator = seeded(1)
    drawn = torch.stack([control_labels(torch.arange(6), generator, 0.3) for _ in range(3000)])
    chances = drawn.double().mean(0)
    assert (chances - 0.3).abs().max() < 4 * (0.21 / 3000) ** 0.5
    correlations = torch.corrcoef(drawn.double().T) - torch.eye(6)
    assert correlations.abs().max() < 4.5 / 3000**0.5


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


@pytest.mark.slow
def test_held_out_words_are_at_chance_where_exactly_half_of_all_would_be_below():
    """24 words, each held out once in six folds: why the coins are independent."""
    generator = seeded(3)
    x, fold = torch.randn(24, 64, generator=generator) + 3, torch.arange(24) % 6

    def read(labels):
        """The share of words that are read rightly where they are held out."""
        right = torch.zeros(24)
        for k in range(6):
            reader = fit_direction(x[fold != k], labels[fold != k])
            said = project(x[fold == k], reader.direction) > reader.threshold
            right[fold == k] = (said == labels[fold == k]).float()
        return right.mean().item()

    coins = [read(control_labels(torch.arange(24), generator)) for _ in range(1000)]
    halves = [read(torch.randperm(24, generator=generator) < 12) for _ in range(1000)]
    error = 4 * (0.25 / 24 / 1000) ** 0.5
    assert abs(sum(coins) / 1000 - 0.5) < error < 0.5 - sum(halves) / 1000


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        control_labels(torch.tensor([1, 2]), seeded(0), share)
