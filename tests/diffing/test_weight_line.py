"""Integrals along the line of weights: quadrature, and the shift by the weights that changed."""

import copy

import pytest
import torch

from rlhf_lab.diffing import WeightLine, coarse_groups, restrict, shift_by_weights
from rlhf_lab.diffing.weight_line import quadrature
from rlhf_lab.models import add_lora, load_model
from tests.tiny_families import random_tokens, tiny_of

WORDS, POS = (5, 9), -3


def difference(logits):
    return (logits[:, POS, WORDS[0]] - logits[:, POS, WORDS[1]]).double()


def test_two_nodes_match_hand_computed():
    """Two nodes at 1/2 -+ 1/sqrt(12), each with half the weight; 8 are exact to degree 15."""
    at, weights = quadrature(2)
    assert at == pytest.approx([0.2113248654, 0.7886751346]) and weights == [0.5, 0.5]
    at, weights = quadrature(8)
    assert sum(w * a**15 for a, w in zip(at, weights, strict=True)) == pytest.approx(1 / 16)


def test_shift_matches_integral_of_gradients(base, far, reviews):
    """Each group's row against backward passes of the mean, with 8 nodes written out."""
    tokens, groups = reviews[:2, :12], coarse_groups(base)
    line, found = WeightLine(base, far), shift_by_weights(base, far, tokens, POS, WORDS, groups)
    assert all(torch.equal(line.at(1.0)[name], weight) for name, weight in far.named_parameters())
    shift = difference(far(tokens)) - difference(base(tokens))
    assert shift.abs().min() > 0.01
    torch.testing.assert_close(found.sum(0), shift, atol=1e-3, rtol=0)
    few = shift_by_weights(base, far, tokens, POS, WORDS, groups, nodes=1)  # doubled
    torch.testing.assert_close(few.sum(0), shift, atol=1e-3, rtol=0)
    expected = torch.zeros(len(groups), dtype=torch.float64)
    for at, weight in zip(*quadrature(8), strict=True):
        weights = {name: x.requires_grad_() for name, x in line.at(at).items()}
        gradients = torch.autograd.grad(
            difference(line.logits(weights, tokens)).mean(), list(weights.values())
        )
        moved = {n: g * line.delta[n] for n, g in zip(weights, gradients, strict=True)}
        for i, name in enumerate(groups.names):
            expected[i] += weight * sum(x.sum() for x in restrict(moved, groups, name).values())
    torch.testing.assert_close(found.mean(1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_adapters_of_other_architectures_sum_to_the_shift(architecture, llama_tokenizer):
    base = load_model(tiny_of(architecture), llama_tokenizer)
    tuned, tokens = copy.deepcopy(base), random_tokens(2, 12)
    add_lora(tuned, rank=2, alpha=4.0, targets=("W_V", "W_out"))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            weight += 0.1 * name.endswith(".B")
    groups = coarse_groups(base)
    found = shift_by_weights(base, tuned, tokens, POS, WORDS, groups)
    shift = difference(tuned(tokens)) - difference(base(tokens))
    torch.testing.assert_close(found.sum(0), shift, atol=1e-3, rtol=0)
    assert not found[groups.names.index("unembed")].any()
