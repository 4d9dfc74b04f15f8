import pytest
import torch

from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.views.intervals import bracketed, mean_of_rows, whisker_ends
from rlhf_lab.views.ledger import TERM_TENSORS, interval_of_terms

GENERATOR = torch.Generator().manual_seed(0)


def test_ends_of_rows_are_those_of_each_alone():
    rows = torch.rand(3, 12, generator=GENERATOR)
    low, high = whisker_ends(mean_of_rows(rows))
    for i, row in enumerate(rows):
        one = bootstrap_interval(row, resamples=RESAMPLES)
        assert (low[i], high[i]) == pytest.approx((one.low.item(), one.high.item()))
    assert whisker_ends(mean_of_rows(rows[:, :1])) == ([None] * 3, [None] * 3)


def test_a_bracket_stands_only_where_there_is_an_interval():
    assert bracketed(0.42, 0.314, 0.53) == "0.42 [0.314, 0.53]"
    assert bracketed(0.42, None, 0.5) == "0.42" and bracketed(None, 0.1, 0.2) == "–"


def test_a_term_is_a_mean_over_the_tokens_of_the_drawn_sequences():
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 4, 5, 6, 2, 2])[:, None]
    columns = {name: torch.rand(8, 6, generator=GENERATOR) * mask for name in TERM_TENSORS.values()}
    found = interval_of_terms(columns | {"mask": mask})
    tokens = mask.sum().item()
    for i, name in enumerate(TERM_TENSORS.values()):
        mean = bootstrap_interval(columns[name], mask=mask, resamples=RESAMPLES)
        assert found.value[i].item() == pytest.approx(columns[name].sum().item(), rel=1e-5)
        assert found.low[i].item() == pytest.approx(mean.low.item() * tokens, rel=1e-5)
        assert found.high[i].item() == pytest.approx(mean.high.item() * tokens, rel=1e-5)


def test_where_sequences_are_averaged_lengths_weigh_nothing():
    mask = torch.arange(4) < torch.tensor([4, 1, 2])[:, None]
    each = torch.tensor([0.3, 0.1, 0.2])[:, None] * mask / mask.sum(1, keepdim=True)
    found = interval_of_terms(dict.fromkeys(TERM_TENSORS.values(), each) | {"mask": mask}, False)
    one = bootstrap_interval(torch.tensor([0.3, 0.1, 0.2]), resamples=RESAMPLES)
    assert found.value[0].item() == pytest.approx(0.6)
    assert found.low[0].item() == pytest.approx(3 * one.low.item(), rel=1e-5)
