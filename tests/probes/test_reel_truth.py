import pytest
import torch

from rlhf_lab.organism import state_values
from rlhf_lab.organism.beliefs import sentiment_belief
from rlhf_lab.organism.lexicon import WORD_IDS
from rlhf_lab.organism.rewards import REWARDS
from rlhf_lab.probes import ReelTruth


@pytest.mark.slow
def test_values_and_beliefs_are_the_organism_s(truth, reviews):
    tokens = reviews[0].clone()
    tokens[0, 7] = WORD_IDS["popcorn"]
    expected, _ = state_values(truth.policy, truth.reward, tokens)
    values, mask = truth.values(tokens)
    assert mask[0].sum() == 7 and bool(mask[1:].all())
    torch.testing.assert_close(values, expected.float())
    beliefs, defined = truth.beliefs(tokens)
    assert torch.equal(defined, mask)
    index, _ = truth.graph.walk(tokens)
    rows = [[sentiment_belief(truth.graph.states[t][i])[1] for t, i in enumerate(r)] for r in index]
    torch.testing.assert_close(beliefs[mask], torch.tensor(rows)[mask])


def test_information_sums_to_the_variance_of_the_reward(truth):
    rewards, chances = truth.final_rewards
    variance = (chances * rewards**2).sum() - (chances * rewards).sum() ** 2
    information = truth.information
    assert information.shape == (29,) and information[0] == 0
    assert information.sum().item() == pytest.approx(variance, rel=1e-5)


def test_slots_are_named_with_their_clause_and_go_on_past_the_review(truth):
    names = truth.slot_names(31)
    found = [names[t] for t in (0, 9, 10, 24, 28, 29)]
    assert found == ["BOS", "ADJ 1", "CONN 2", "VERB", "EOS", "+0"]


def test_an_unknown_reward_is_measured_against_true_reward():
    assert ReelTruth.of_reward("sentiment").reward is REWARDS["true_reward"]
    assert ReelTruth.of_reward("ignore_negation").reward is REWARDS["ignore_negation"]


@pytest.mark.slow
def test_values_are_before_tokens_and_advantages_across(truth, reviews):
    tokens = reviews[0].clone()
    tokens[0, 9] = WORD_IDS["."]  # leaves the grammar
    at, _ = truth.values(tokens)
    values, advantages, mask = truth.generated(tokens, prefix_len=3)
    assert values.shape == (12, 26) and bool(mask[1:].all())
    torch.testing.assert_close(values[1:], at[1:, 2:-1])
    torch.testing.assert_close(advantages[1:], at[1:, 3:] - at[1:, 2:-1])
    assert mask[0].nonzero().flatten().tolist() == [*range(6)] and not advantages[0, 6:].any()
