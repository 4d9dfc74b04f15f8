"""False steps: texts by hand, answers by a known sampler, and answers known from the grammar."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism.grammar import decode
from rlhf_lab.organism.sums import SUMS_IDS, SUMS_WORDS, SumsGrammar
from rlhf_lab.probes import answers_after_false_step, false_steps, write_false_step

GRAMMAR = SumsGrammar()
SUM = GRAMMAR.make_problems([6], [9])  # 15


@pytest.fixture(scope="module")
def policy():
    return TransformerWithValueHead(load_model("sums-nano"))


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
        ("answer2", 1, "6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 1 1 5"),
    ],
)
def test_digits_after_a_false_one_match_hand_written(slot, shift, steps):
    (row,) = write_false_step(GRAMMAR, SUM, slot, shift)
    assert decode(row.tolist(), SUMS_WORDS) == f"0 0 0 6 + 0 0 0 9 = so {steps}"


@pytest.mark.parametrize(("word", "written"), [(None, "0"), (";", ";")])
@pytest.mark.parametrize("name", ["right", "follows", "neither"])
@pytest.mark.usefixtures("no_type_checks")
def test_answers_are_compared_with_both_sums(policy, name, word, written, monkeypatch):
    """A sampler that writes the end of another text."""
    problems = GRAMMAR.make_problems([6, 12, 345], [9, 39, 298])  # each with a carry from the units
    slots, prompts = {"follows": ("c1", 1), "neither": ("s2", 4)}, []
    other = write_false_step(GRAMMAR, problems, *slots.get(name, ("c1", 0)))

    def continued(policy, rows, spec, generator, part_size):
        prompts.extend(rows)
        tokens = torch.cat([torch.tensor(rows), other[:, len(rows[0]) :]], dim=1)
        assert tokens.shape == (3, 43) == (3, len(rows[0]) + spec.gen_len)
        assert generator.initial_seed() == 7
        return SimpleNamespace(tokens=tokens)

    monkeypatch.setattr(false_steps, "sample", continued)
    found = answers_after_false_step(policy, GRAMMAR, problems, "c1", word=word, seed=7)
    assert found.right.tolist() == [name == "right"] * 3
    assert found.follows.tolist() == [name == "follows"] * 3
    false = write_false_step(GRAMMAR, problems, "c1")[:, :21]  # a b c t s ; a b c after "so"
    assert [row[:-1] for row in prompts] == false[:, :-1].tolist()
    assert {row[-1] for row in prompts} == {SUMS_IDS[written]}


def test_text_without_an_answer_is_neither_right_nor_follows(policy, monkeypatch):
    unended = lambda policy, rows, *others, **named: SimpleNamespace(tokens=torch.tensor(rows))
    monkeypatch.setattr(false_steps, "sample", unended)
    found = answers_after_false_step(policy, GRAMMAR, SUM, "answer0", word=";")
    assert not found.right.any() and not found.follows.any()


@pytest.mark.usefixtures("no_type_checks")
def test_digits_words_and_models_without_an_effect_raise(policy, reel_policy):
    for slot in ("t3", "#", "open", "c4", "x"):
        with pytest.raises(ValueError, match="is not a digit with an effect"):
            write_false_step(GRAMMAR, SUM, slot)
    for slot, shift in (("a0", 10), ("c1", 2), ("t0", -2), ("a0", 1.5)):
        with pytest.raises(ValueError, match="shift"):
            write_false_step(GRAMMAR, SUM, slot, shift)
    for model, word, shift, message in (
        (policy, "zebra", 1, "word='zebra' must be one of"),
        (policy, ";", 2, "word=';' must be one of"),
        (reel_policy, None, 1, "Use base_model='sums-nano'"),
    ):
        with pytest.raises(ConfigError, match=message):
            answers_after_false_step(model, GRAMMAR, SUM, "c1", shift, word)


@pytest.mark.slow
def test_answers_of_sums_nano_match_the_grammar(policy):
    """Only hasty drops a carry, and then keeps each later one w.p. 0.4."""
    problems = GRAMMAR.problems(1200, np.random.default_rng(1), [3])
    problems = problems[problems.carry_in[:, 1] == 1][:400]
    found = answers_after_false_step(policy, GRAMMAR, problems, "c1")
    response = write_false_step(GRAMMAR, problems, "c1")[:, GRAMMAR.prompt_len :]
    later = sum(response[:, GRAMMAR.slot(name)] == SUMS_IDS["1"] for name in ("t1", "t2"))
    assert (0.8**later).mean() - (0.4**later).mean() > 0.2
    assert found.follows.float().mean().item() == pytest.approx((0.4**later).mean().item(), abs=0.1)
    assert not found.right.any()
