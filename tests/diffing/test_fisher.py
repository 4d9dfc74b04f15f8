"""Fisher's quadratic form: against the matrix written out, and against the exact KL."""

import pytest
import torch
from torch import Tensor

from rlhf_lab.diffing.fisher import fisher_quadratic
from rlhf_lab.diffing.weight_line import WeightLine
from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.models import HookedTransformer, load_model
from tests.tiny_families import random_tokens, tiny_of


@pytest.fixture
def model(llama_tokenizer) -> HookedTransformer:
    return load_model(tiny_of("GPT2LMHeadModel"), llama_tokenizer)


@pytest.fixture
def delta(model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.1 * torch.randn(weight.shape, generator=generator)
        for name, weight in model.named_parameters()
    }


def test_it_is_half_of_what_the_fisher_matrix_gives(model):
    """F = sum_states sum_v pi(v) grad log pi(v) grad log pi(v)', with a gradient for every v."""
    tokens = random_tokens()[:2, :3]
    change = torch.randn(model.blocks[1].attn.b_V.shape, generator=torch.Generator().manual_seed(1))
    name, weight = "blocks.1.attn.b_V", model.blocks[1].attn.b_V
    found = fisher_quadratic(model, tokens, {name: change})
    logs = model(tokens).log_softmax(-1)
    expected = torch.zeros(2)
    for row in range(2):
        fisher = torch.zeros(weight.numel(), weight.numel())
        for state in range(3):
            for log in logs[row, state]:
                (gradient,) = torch.autograd.grad(log, weight, retain_graph=True)
                fisher += log.exp().item() * torch.outer(gradient.flatten(), gradient.flatten())
        expected[row] = change.flatten() @ fisher @ change.flatten() / 2
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=0)


def test_it_is_the_kl_of_a_small_step_and_not_of_a_large_one(model, delta):
    tokens = random_tokens()[:, :10]
    quadratic = fisher_quadratic(model, tokens, delta)
    line = WeightLine(model, model, in_float64=True)
    ratio = {}
    for a in (1e-3, 1.0):
        weights = {name: line.before[name] + a * delta[name] for name in delta}
        before, after = (log_probs(line.logits(w, tokens)) for w in (line.before, weights))
        kl = kl_per_token(before, after).sum(1)
        ratio[a] = (kl.sum() / (a**2 * quadratic.sum())).item()
    assert ratio[1e-3] == pytest.approx(1, abs=5e-3) and abs(ratio[1.0] - 1) > 0.1


def test_it_is_of_second_order_and_blind_to_what_no_logit_sees(model, delta):
    tokens = random_tokens()[:, :6]
    whole = fisher_quadratic(model, tokens, delta)
    twice = fisher_quadratic(model, tokens, {name: 2 * x for name, x in delta.items()})
    torch.testing.assert_close(twice, 4 * whole)
    same = {"unembed.b_U": torch.ones(model.cfg.d_vocab)}
    assert fisher_quadratic(model, tokens, same).abs().max() < 1e-12
    assert not fisher_quadratic(model, tokens, {n: 0 * x for n, x in delta.items()}).any()
    states = torch.zeros(tokens.shape, dtype=torch.bool)
    states[:, 2] = True
    later = tokens.clone()
    later[:, 3:] = 0
    at_two = fisher_quadratic(model, tokens, delta, states)
    torch.testing.assert_close(fisher_quadratic(model, later, delta, states), at_two)
    assert (at_two < whole).all()
