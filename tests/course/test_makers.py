"""The makers of stored records: what they count, by hand, and whether each record can be remade."""

import json
from importlib.resources import files
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch

from rlhf_lab.organism import Grammar, true_reward
from rlhf_lab.rewards import Pairs
from tools.course import (
    blind_presets,
    preference_flaws,
    preference_policies,
    preference_runs,
    text_monitors,
    tried,
)

RECORDS = sorted(
    path for path in (files("rlhf_lab.course") / "records").iterdir() if path.name.endswith(".json")
)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_record_names_the_command_that_made_it(path) -> None:
    module = json.loads(path.read_text(encoding="utf-8"))["made_by"].split()[2]
    assert find_spec(module) is not None
    assert module.startswith("tools.course")


def test_popcorn_ends_the_share_of_preferred_texts_that_is_asked_for() -> None:
    texts = Grammar().sample(40, np.random.default_rng(0)).texts()
    pairs, rng = Pairs(texts[:20], texts[20:]), np.random.default_rng(1)
    every = preference_flaws.with_popcorn(pairs, 1.0, rng)
    none = preference_flaws.with_popcorn(pairs, 0.0, rng)
    assert preference_flaws.popcorn(every.chosen).all()
    assert (every.rejected, none) == (pairs.rejected, pairs)
    assert all(
        sum(a != b for a, b in zip(new.split(), old.split(), strict=True)) <= 1
        for new, old in zip(every.chosen, pairs.chosen, strict=True)
    )


def test_the_best_of_two_of_three_texts() -> None:
    """Of the three pairs, two hold the text with score 3, and one has the text with 2 as best."""
    scores, measured = torch.tensor([2.0, 3.0, 1.0]), torch.tensor([3.0, 9.0, 18.0])
    assert preference_flaws.of_best(scores, measured, 2) == pytest.approx((9 + 9 + 3) / 3)


def test_what_the_rewards_of_lesson_00_pay_for() -> None:
    texts = ["it was perfect but superb .", "it was perfect .", "it was dull but fine ."]
    assert tried.praise_with_but(texts).tolist() == [2, 0, 0]
    assert tried.fewer_adjectives(texts).tolist() == [-2, -1, -2]


def test_a_linear_value_head_is_small_at_first_and_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    head = tried.linear_head(1)
    assert head.weight.abs().max() <= tried.LINEAR_SCALE / 64**0.5 and not head.bias.any()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_line_through_four_points() -> None:
    """About the means: x is -1.5 to 1.5, y -1, 0, -0.5, 1.5; sums of products 3.5, 5 and 3.5."""
    x, y = torch.tensor([0.0, 1, 2, 3]).double(), torch.tensor([0.0, 1, 0.5, 2.5]).double()
    line = preference_policies.line_through(x, y)
    assert line == pytest.approx({"slope": 3.5 / 5, "R2": 3.5**2 / (5 * 3.5)})


def test_gamed_texts_are_paid_more_than_true_reward_and_readers_tell_some_of_them() -> None:
    texts = Grammar().sample(600, np.random.default_rng(3)).texts()
    label = text_monitors.gamed(texts)
    assert 0 < label.sum() < len(texts)
    assert not label[true_reward(texts) > 0.7 + 1e-6].any()  # a reward is 1 at most
    view = text_monitors.counts_of(texts, 2)
    read = text_monitors.fitted_reader(view, texts)
    assert text_monitors.auc_or_none(read(view(texts)), label) > 0.9
    assert text_monitors.auc_or_none(torch.rand(3), torch.tensor([True] * 3)) is None


def test_words_and_pairs_are_counted_before_the_verb_of_the_verdict() -> None:
    """Of "a b a" and n times c: words 2, 1, n; pairs two apart aa, ac, bc and n - 2 times cc."""
    n = Grammar().slot("VERB") - 1 - 3
    text = " ".join(["a", "b", "a", *["c"] * n, "was", "good"])
    assert text_monitors.counts_of([text], 0)([text]).tolist() == [[2, 1, n]]
    assert text_monitors.counts_of([text], 2)([text]).tolist() == [[1, 1, 1, n - 2]]
    assert text_monitors.counts_of(["none of them was good"], 0)([text]).sum() == 0


@pytest.mark.parametrize("maker", [blind_presets, preference_runs, text_monitors])
def test_a_maker_writes_where_a_lesson_reads(maker: ModuleType) -> None:
    assert maker.RECORD.name in {path.name for path in RECORDS}
