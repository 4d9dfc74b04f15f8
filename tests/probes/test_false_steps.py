"""False steps: texts by hand, answers by a known sampler, and answers known from the grammar."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism.grammar import decode
from rlhf_lab.organism.sums import SUMS_IDS, SUMS_WORDS, SumsGrammar, right_texts
from rlhf_lab.probes import answers_after_false_step, false_steps, write_false_step

GRAMMAR = SumsGrammar()
SUM = GRAMMAR.make_problems([6], [9])  # 15


@pytest.mark.parametrize(
    ("slot", "shift", "steps"),
    [
        ("c1", 0, "6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 5"),
        ("c1", 1, "6 9 0 1 5 ; 0 0 0 0 0 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 0 5"),
        ("t0", 1, "6 9 0 0 5 ; 0 0 0 0 0 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 0 5"),
        ("c0", 1, "6 9 1 1 6 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 6"),
        ("b0", 1, "6 0 0 0 6 ; 0 0 0 0 0 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 0 6"),
        ("a1", 9, "6 9 0 1 5 ; 9 0 1 1 0 ; 0 0 1 0 1 ; 0 0 0 0 0 ; # 0 1 0 5"),
        ("s1", -1, "6 9 0 1 5 ; 0 0 1 0 0 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 0 5"),
        ("s0", -6, "6 9 0 1 9 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 9"),
        ("answer2", 1, "6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 1 1 5"),
    ],
)
def test_digits_after_a_false_one_match_hand_written(slot, shift, steps):
    (row,) = write_false_step(GRAMMAR, SUM, slot, shift)
    assert decode(row.tolist(), SUMS_WORDS) == f"0 0 0 6 + 0 0 0 9 = so {steps}"


def test_steps_without_a_false_digit_are_those_of_right_texts():
    problems = GRAMMAR.problems(50, np.random.default_rng(0))
    true = right_texts(GRAMMAR, problems)[:, 0]
    for slot in ("a0", "c3", "s2"):
        assert torch.equal(write_false_step(GRAMMAR, problems, slot, 0), true)


@pytest.mark.parametrize("slot", ["t3", "#", "open", "c4", "x"])
def test_write_false_step_raises_on_slots_without_an_effect(slot):
    with pytest.raises(ValueError, match="is not a digit with an effect"):
        write_false_step(GRAMMAR, SUM, slot)


@pytest.mark.parametrize(("word", "written"), [(None, "0"), (";", ";")])
@pytest.mark.parametrize("name", ["right", "follows", "neither"])
@pytest.mark.usefixtures("no_type_checks")
def test_answers_are_compared_with_both_sums(name, word, written, monkeypatch):
    """A sampler that writes the end of another text."""
    problems = GRAMMAR.make_problems([6, 12, 345], [9, 39, 298])  # each with a carry from the units
    slots = {"right": ("c1", 0), "follows": ("c1", 1), "neither": ("s2", 4)}
    other, prompts = write_false_step(GRAMMAR, problems, *slots[name]), []

    def continued(policy, rows, spec, generator, part_size):
        prompts.extend(rows)
        tokens = torch.cat([torch.tensor(rows), other[:, len(rows[0]) :]], dim=1)
        assert tokens.shape == (3, 43) == (3, len(rows[0]) + spec.gen_len)
        return SimpleNamespace(tokens=tokens)

    monkeypatch.setattr(false_steps, "sample", continued)
    policy = TransformerWithValueHead(load_model("sums-nano"))
    found = answers_after_false_step(policy, GRAMMAR, problems, "c1", word=word)
    assert found.right.tolist() == [name == "right"] * 3
    assert found.follows.tolist() == [name == "follows"] * 3
    false = write_false_step(GRAMMAR, problems, "c1")[:, :21]  # a b c t s ; a b c after "so"
    assert [row[:-1] for row in prompts] == false[:, :-1].tolist()
    assert {row[-1] for row in prompts} == {SUMS_IDS[written]}


def test_text_without_an_answer_is_neither_right_nor_follows(monkeypatch):
    unended = lambda policy, rows, *others, **named: SimpleNamespace(tokens=torch.tensor(rows))
    monkeypatch.setattr(false_steps, "sample", unended)
    policy = TransformerWithValueHead(load_model("sums-nano"))
    found = answers_after_false_step(policy, GRAMMAR, SUM, "answer0", word=";")
    assert not found.right.any() and not found.follows.any()


@pytest.mark.parametrize(("slot", "shift"), [("a0", 10), ("c1", 2), ("t0", -2), ("a0", 1.5)])
@pytest.mark.usefixtures("no_type_checks")
def test_write_false_step_raises_on_shifts_without_an_effect(slot, shift):
    with pytest.raises(ValueError, match="shift"):
        write_false_step(GRAMMAR, SUM, slot, shift)


@pytest.mark.parametrize(("word", "shift"), [("zebra", 1), (";", 2)])
def test_answers_raise_on_unknown_words_and_ignored_shifts(word, shift):
    policy = TransformerWithValueHead(load_model("sums-nano"))
    with pytest.raises(ConfigError, match=f"word='{word}' must be one of"):
        answers_after_false_step(policy, GRAMMAR, SUM, "c1", shift, word)


def test_answers_raise_on_a_model_of_another_language(reel_policy):
    with pytest.raises(ConfigError, match="Use base_model='sums-nano'"):
        answers_after_false_step(reel_policy, GRAMMAR, SUM, "c1")


@pytest.mark.slow
def test_answers_of_sums_nano_match_the_grammar():
    """Only hasty drops a carry, and then keeps each later one w.p. 0.4."""
    problems = GRAMMAR.problems(1200, np.random.default_rng(1), [3])
    problems = problems[problems.carry_in[:, 1] == 1][:400]
    policy = TransformerWithValueHead(load_model("sums-nano"))
    found = answers_after_false_step(policy, GRAMMAR, problems, "c1")
    response = write_false_step(GRAMMAR, problems, "c1")[:, GRAMMAR.prompt_len :]
    later = sum(response[:, GRAMMAR.slot(name)] == SUMS_IDS["1"] for name in ("t1", "t2"))
    assert (0.8**later).mean() - (0.4**later).mean() > 0.2
    assert found.follows.float().mean().item() == pytest.approx((0.4**later).mean().item(), abs=0.1)
    assert not found.right.any()
