"""Expected true reward from lumped states: exact where samples stand in exact proportion."""

import numpy as np
import pytest
import torch

from rlhf_lab.organism import Grammar, true_reward
from rlhf_lab.organism.grammar import decode
from rlhf_lab.organism.lexicon import VOCABULARY, WORD_IDS
from rlhf_lab.organism.lumped import LumpedState, expected_true_reward, lumped_states, transitions
from tests.organism.faults_lumped import LUMPED_FAULTS
from tests.probes.planting import planted, told_by

MINI = Grammar(n_clauses=1)
FREE = ("OPEN", "COP", "ADJ", "VERB")


def choices(slot: str, words: list[str]) -> dict[str, float]:
    """A policy that is no function of the lumped state: it remembers how the review opens."""
    odd = words[2] == "wow" if len(words) > 2 else False
    return {
        "OPEN": {"wow": 0.5, "overall": 0.5},
        "COP": {"was": 0.75, "wasn't": 0.25} if odd else {"was": 0.25, "wasn't": 0.75},
        "ADJ": {"good": 0.75, "bad": 0.25} if odd else {"good": 0.25, "bad": 0.5, "bye": 0.25},
        "VERB": {"loved": 0.75, "hated": 0.25} if odd else {"loved": 0.5, "hated": 0.5},
    }[slot]


def everything() -> tuple[torch.Tensor, torch.Tensor]:
    """All reviews of the policy, each as often as its share of 512, and the probabilities."""
    rows, chances = [([], 1.0, [])], []
    for slot in MINI.slots[1:]:
        grown = []
        for words, share, seen in rows:
            allowed = choices(slot.name, words) if slot.name in FREE else {slot.words[0]: 1.0}
            full = np.zeros(len(VOCABULARY))
            for word, p in allowed.items():
                full[WORD_IDS[word]] = p
            grown += [([*words, word], share * p, [*seen, full]) for word, p in allowed.items()]
        rows = grown
    tokens, chances = [], []
    for words, share, seen in rows:
        times = round(share * 512)
        assert times == share * 512
        tokens += [[WORD_IDS["<bos>"], *(WORD_IDS[word] for word in words)]] * times
        chances += [np.stack(seen)] * times
    return torch.tensor(tokens), torch.from_numpy(np.stack(chances))


@pytest.fixture(scope="module")
def population():
    return everything()


@pytest.mark.parametrize("prefix_len", [1, 3, 5])
def test_the_whole_population_has_its_own_mean(population, prefix_len):
    """Reviews with "bye" for an adjective, a third of those that open otherwise, earn 0."""
    tokens, probs = population
    found = expected_true_reward(probs[:, prefix_len - 1 :], tokens, MINI)
    scorer = true_reward.__class__("mini", true_reward.score, MINI)
    mean = scorer([decode(row) for row in tokens.tolist()]).double().mean().item()
    assert found.value == pytest.approx(mean, abs=1e-6) and 0.2 < mean < 0.8
    assert found.lost == 0.0


def test_states_that_no_sample_visits_are_reported_as_lost(population):
    tokens, probs = population
    was = tokens[:, [slot.name for slot in MINI.slots].index("COP")] == WORD_IDS["was"]
    found = expected_true_reward(probs[was], tokens[was], MINI)
    # the chance of "wasn't", behind which no sample goes on
    wow = tokens[was][:, 3] == WORD_IDS["wow"]
    assert found.lost == pytest.approx(torch.where(wow, 0.25, 0.75).double().mean().item())
    assert found.value < 1 - found.lost


def test_fewer_samples_do_than_for_a_mean_of_rewards(population):
    tokens, probs = population
    scorer = true_reward.__class__("mini", true_reward.score, MINI)
    rewards = scorer([decode(row) for row in tokens.tolist()]).double()
    generator, means, lumped = torch.Generator().manual_seed(0), [], []
    for _ in range(40):
        drawn = torch.randint(len(tokens), (64,), generator=generator)
        means.append(rewards[drawn].mean().item())
        lumped.append(expected_true_reward(probs[drawn], tokens[drawn], MINI).value)
    assert np.std(lumped) < 0.7 * np.std(means)
    assert np.mean(lumped) == pytest.approx(rewards.mean().item(), abs=0.02)


def test_the_states_are_as_many_as_true_reward_can_tell_apart():
    grammar = Grammar()
    assert len(lumped_states(grammar)) + 1 == 43
    verb, start = grammar.slot("VERB"), 1 + lumped_states(grammar).index(LumpedState(1, False, 0))
    after = transitions(grammar)[verb, start]
    assert lumped_states(grammar)[after[WORD_IDS["hated"]] - 1] == LumpedState(1, False, -1)
    assert not after[WORD_IDS["the"]] and not transitions(grammar)[:, 0].any()


def test_samples_of_another_length_are_refused(population):
    tokens, probs = population
    with pytest.raises(ValueError, match="whole samples of 29 tokens"):
        expected_true_reward(probs, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("fault", LUMPED_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told(fault, request, no_type_checks):
    transitions.cache_clear()
    try:
        with planted(fault):
            told_by(globals()[fault.run], request, prefix_len=3)
    finally:
        transitions.cache_clear()
