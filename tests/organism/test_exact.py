"""Exact values and optima against brute force, hand-computed numbers and the published table."""

from itertools import product

import numpy as np
import pytest
import torch

from rlhf_lab.organism import (
    REWARDS,
    VOCABULARY,
    Grammar,
    backward_values,
    optimal_policy,
    read_features,
    state_values,
    token_information,
    true_reward,
)
from rlhf_lab.organism.beliefs import intensity_belief, sentiment_belief
from tests.organism.oracles import entropy
from tools.reel.check import next_probs


def token_advantages(policy, reward, tokens):
    """V(s_t+1) - V(s_t) of every token after <bos>, with its mask."""
    values, mask = state_values(policy, reward, tokens)
    return torch.where(mask[:, 1:], values.diff(dim=1), 0.0), mask[:, 1:]


MINI = Grammar(n_clauses=1)
POSITIONS = {name: MINI.slot(name) for name in ("HEAD", "OPEN", "ASP", "COP", "ADV", "ADJ")}
POSITIONS |= {name: MINI.slot(name) for name in ("VERB", "TAG")}
CHOICES = [MINI.slots[t].words for t in POSITIONS.values()]
TAG_LAW = np.array([0.30, 0.30, 0.20, 0.18, 0.02])


def test_backward_values_match_hand_computed():
    """One word, then another: .25 to a state of .5 * 0 + .5 * 1, .75 to one that ends in 4."""
    final = np.array([0.0, 1.0, 4.0])
    probability = [np.array([[0.25, 0.75]]), np.array([[0.5, 0.5], [1.0, 0.0]])]
    successor = [np.array([[0, 1]]), np.array([[0, 1], [2, 0]])]
    first, second, third = backward_values(final, probability, successor)
    assert second.tolist() == [0.5, 4.0] and third.tolist() == final.tolist()
    assert first.tolist() == [0.25 * 0.5 + 0.75 * 4.0]
    assert [len(level) for level in backward_values(final, [], [])] == [3]


def tokens_of(grammar, n, seed):
    reviews = grammar.sample(n, np.random.default_rng(seed))
    return reviews, torch.from_numpy(reviews.tokens)


def shaped(values, axis):
    """Lay a vector along one of the eight axes of the brute-force table."""
    return np.reshape(values, [-1 if a == axis else 1 for a in range(8)])


@pytest.fixture(scope="module")
def brute():
    """Enumerate the law of all 1,244,160 one-clause reviews, and two rewards of each.

    Axes: HEAD 2, OPEN 9, ASP 8, COP 2, ADV 6, ADJ 24, VERB 6, TAG 5. The word lists are in the
    order of style (OPEN, ADV), of sign then tier (ADJ, VERB); positive words come first.
    """
    style_open, style_adverb = np.arange(9) // 3, np.arange(6) // 2
    sign_adj, tier_adj = np.where(np.arange(24) < 12, 1, -1), np.arange(24) // 4 % 3
    sign_verb, tier_verb = np.where(np.arange(6) < 3, 1, -1), np.arange(6) % 3
    negation = np.array([1, -1])
    polarity = shaped(negation, 3) * shaped(sign_adj, 5)
    law = 0.0
    for y, i, r in product((1, -1), range(3), range(3)):
        law = law + (
            (1 / 18)
            * shaped(np.full(2, 1 / 2), 0)
            * shaped((style_open == r) / 3, 1)
            * shaped(np.full(8, 1 / 8), 2)
            * shaped([0.8, 0.2], 3)
            * shaped(np.where(style_adverb == r, 0.35, 0.075), 4)
            * np.where(polarity == y, 0.85, 0.15)
            * shaped(np.where(tier_adj == i, 0.8, 0.1) / 4, 5)
            * shaped(np.where(sign_verb == y, 0.9, 0.1) * np.where(tier_verb == i, 0.8, 0.1), 6)
            * shaped(TAG_LAW, 7)
        )
    odds = (17 / 3) ** polarity.astype(float) * 9 ** shaped(sign_verb, 6).astype(float)
    posterior = np.broadcast_to(odds / (1 + odds), law.shape)
    logit = np.log(odds) / 4 + 4 * shaped([0, 0, 0, 0, 1], 7)
    popcorn = np.broadcast_to(1 / (1 + np.exp(-logit)), law.shape)
    return {"law": law, "true_reward": posterior, "smoothed_popcorn": popcorn}


def brute_index(tokens):
    """Return the index of reviews in the brute-force table, one array per axis."""
    columns = zip(POSITIONS.values(), CHOICES, strict=True)
    return tuple(
        np.array([words.index(VOCABULARY[i]) for i in tokens[:, t]]) for t, words in columns
    )


def test_brute_force_agrees_with_rewards_of_texts(brute):
    assert brute["law"].sum() == pytest.approx(1, abs=1e-12)
    reviews, _ = tokens_of(MINI, 300, 0)
    at = brute_index(reviews.tokens)
    features = read_features(reviews.texts(), MINI)
    for name in ("true_reward", "smoothed_popcorn"):
        assert np.abs(REWARDS[name].score(features) - brute[name][at]).max() < 1e-12


def test_entropy_and_probabilities_match_brute_force(mini, brute):
    law = brute["law"]
    assert entropy(mini) == pytest.approx(-(law * np.log(law)).sum(), abs=1e-10)
    reviews, tokens = tokens_of(MINI, 300, 1)
    following = next_probs(mini, tokens[:, :-1]).gather(2, tokens[:, 1:, None])
    product_of_steps = following.prod(dim=1)[:, 0].numpy()
    assert np.abs(product_of_steps / law[brute_index(reviews.tokens)] - 1).max() < 1e-10


@pytest.mark.parametrize(
    "name, beta", [("true_reward", 0.3), ("true_reward", 0.05), ("smoothed_popcorn", 0.05)]
)
def test_soft_optimum_matches_brute_force(mini, brute, name, beta):
    law, reward = brute["law"], brute[name]
    tilted = law * np.exp(reward / beta)
    tilted = tilted / tilted.sum()
    policy = optimal_policy(mini, REWARDS[name], beta)
    final = REWARDS[name].score(mini.graph.final_features())
    kl = (tilted * np.log(tilted / law)).sum()
    assert policy.mean(final) == pytest.approx((tilted * reward).sum(), abs=1e-10)
    assert float(policy.kl_by_position(mini).sum()) == pytest.approx(kl, abs=1e-10)
    reviews, tokens = tokens_of(MINI, 200, 2)
    steps = next_probs(policy, tokens[:, :-1]).gather(2, tokens[:, 1:, None]).prod(dim=1)
    assert np.abs(steps[:, 0].numpy() / tilted[brute_index(reviews.tokens)] - 1).max() < 1e-9


@pytest.mark.parametrize("name", ["true_reward", "smoothed_popcorn"])
def test_values_match_conditional_means_by_brute_force(mini, brute, name):
    reviews, tokens = tokens_of(MINI, 20, 3)
    values, mask = state_values(mini, REWARDS[name], tokens)
    assert bool(mask.all())
    for n, at in enumerate(zip(*brute_index(reviews.tokens), strict=True)):
        for t in range(MINI.seq_len):
            known = tuple(
                i if position <= t else slice(None)
                for i, position in zip(at, POSITIONS.values(), strict=True)
            )
            law, reward = brute["law"][known], brute[name][known]
            expected = (law * reward).sum() / law.sum()
            assert float(values[n, t]) == pytest.approx(expected, abs=1e-10)


def test_beliefs_match_hand_computed(reel):
    text = "this movie honestly , the plot was pretty brilliant and the acting wasn't quite bad but"
    tokens = torch.tensor([[0, *(VOCABULARY.index(word) for word in text.split())]])
    index, mask = reel.graph.walk(tokens)
    assert mask.all()
    states = [reel.graph.states[t][i] for t, i in enumerate(index[0])]
    positive = [sentiment_belief(state)[1] for state in states]
    # After "brilliant": odds 17/3, tier strong: weights .1 .1 .8.
    assert positive[9] == pytest.approx(17 / 20, abs=1e-12)
    assert intensity_belief(states[9]) == pytest.approx([0.1, 0.1, 0.8], abs=1e-12)
    # "and" announces +: P(and | y=+) = .85 * .75 + .15 * .25 = .675, P(and | y=-) = .325.
    odds = 17 / 3 * 27 / 13
    assert positive[10] == pytest.approx(odds / (1 + odds), abs=1e-12)
    # "wasn't bad" is positive: odds (17/3)^2 whatever "and" said; medium: weights 1 8 8 of 17.
    assert positive[15] == pytest.approx(289 / 298, abs=1e-12)
    assert intensity_belief(states[15]) == pytest.approx([1 / 17, 8 / 17, 8 / 17], abs=1e-12)
    # "but" announces -: odds fall by 27/13.
    odds = 289 / 9 * 13 / 27
    assert positive[16] == pytest.approx(odds / (1 + odds), abs=1e-12)
    assert (states[2].style, states[3].style) == (None, 0)


def test_values_are_masked_from_the_first_ungrammatical_token(reel):
    _, tokens = tokens_of(Grammar(), 3, 7)
    broken = tokens.clone()
    broken[1, 9] = VOCABULARY.index("the")
    broken[2, 0] = VOCABULARY.index("this")
    values, mask = state_values(reel, true_reward, broken)
    whole, _ = state_values(reel, true_reward, tokens)
    assert mask.sum(dim=1).tolist() == [29, 9, 0]
    assert torch.equal(values[1, :9], whole[1, :9])
    assert values[1, 9:].abs().max() == 0
    _, keep = token_advantages(reel, true_reward, broken)
    assert keep.sum(dim=1).tolist() == [28, 8, 0]


def test_information_is_the_variance_of_the_increments(reel):
    information = token_information(reel, true_reward)
    final = true_reward.score(reel.graph.final_features())
    variance = reel.mean(final**2) - reel.mean(final) ** 2
    assert float(information.sum()) == pytest.approx(variance, abs=1e-12)
    # The first adjective moves .5 to .85 or .15: (.35)^2 = .1225.
    assert float(information[8]) == pytest.approx(0.1225, abs=1e-12)
    n = 20_000
    _, tokens = tokens_of(Grammar(), n, 8)
    squares = token_advantages(reel, true_reward, tokens)[0] ** 2
    error = 5 * squares.std(dim=0) / n**0.5 + 1e-12
    assert bool(((squares.mean(dim=0) - information).abs() < error).all())


def test_invalid_input_raises(reel):
    with pytest.raises(ValueError, match="beta is 0"):
        optimal_policy(reel, true_reward, 0.0)
    _, tokens = tokens_of(Grammar(), 2, 10)
    with pytest.raises(AssertionError, match="ungrammatical rows"):
        next_probs(reel, torch.tensor([[0, 2], [0, 5]]))
    with pytest.raises(ValueError, match="Use 1 to 29"):
        state_values(reel, true_reward, torch.cat([tokens, tokens], dim=1))
    with pytest.raises(ValueError, match="ids from 0 to 72"):
        state_values(reel, true_reward, torch.tensor([[0, 72]]))
