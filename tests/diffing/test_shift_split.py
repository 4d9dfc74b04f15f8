"""ShiftSplit: numbers by hand, plants whose cause is known, and models of other kinds."""

import copy

import pytest
import torch
from torch import Tensor, nn

from rlhf_lab.diffing.logit_shift import ModelEnd, ShiftCauses, ends_of, split_shift
from rlhf_lab.models import HookedTransformer, load_model
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.probes.logit_shift import SITES, attribute_logits
from rlhf_lab.training.capture import capture_activations
from tests.tiny_families import random_tokens, tiny_of

WORDS = (5, 9)
POS = -3


def split(before: HookedTransformer, after: HookedTransformer, tokens: Tensor) -> ShiftCauses:
    models = before, after
    acts = tuple(capture_activations(model, tokens, SITES, POS) for model in models)
    ends = ends_of(models, acts, tokens, POS, WORDS)
    return split_shift(*ends, is_centered(before.ln_final))


def shift(before: HookedTransformer, after: HookedTransformer, tokens: Tensor) -> Tensor:
    found = [model(tokens)[:, POS].double() for model in (before, after)]
    return (found[1] - found[0])[:, WORDS[0]] - (found[1] - found[0])[:, WORDS[1]]


@pytest.fixture
def pair(base: HookedTransformer) -> tuple[HookedTransformer, HookedTransformer]:
    """The bundled policy, and a copy to be changed."""
    return base, copy.deepcopy(base)


@pytest.fixture
def tokens(reviews: Tensor) -> Tensor:
    return reviews


def changed(module: nn.Module, seed: int) -> None:
    """Add noise of a tenth of each weight's size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += 0.1 * weight.abs().mean() * noise


def test_one_number_by_hand():
    """k from 1 to 2, q from 1 to 3, s from 1 to 2: 1 becomes 12, a shift of 11.

    X00 = 1, X01 = 3, X10 = 2, X11 = 6; s0/3 + s1/6 = 2/3 and s1/3 + s0/6 = 5/6.
    own      = (2 - 1) 2/3 + (6 - 3) 5/6 = 19/6
    read-out = (3 - 1) 2/3 + (6 - 2) 5/6 = 28/6
    scale    = 1/3 + 6/3 + (3 + 2)/6     = 19/6
    With the tuned weights on the base's streams k is 1.25, the other way round 1.5: the weights
    move it by ((1.25 - 1) + (2 - 1.5)) / 2 = 0.375 of 1, its input by the rest.
    """
    number = lambda x: torch.tensor([[[x]]], dtype=torch.float64)
    one = lambda x: torch.tensor([x], dtype=torch.float64)
    before = ModelEnd(
        number(1.0), number(1.5), one(1.0), one(1.0), torch.tensor([0.5, 1.0]).double()
    )
    after = ModelEnd(
        number(2.0), number(1.25), one(2.0), one(3.0), torch.tensor([0.0, 4.0]).double()
    )
    found = split_shift(before, after, centered=False)
    assert found.own_weights[:, 0].tolist() == pytest.approx([0.375 * 19 / 6, 0, 0])
    assert found.inherited[:, 0].tolist() == pytest.approx([0.625 * 19 / 6, 0, 0])
    assert found.scale[:, 0].tolist() == pytest.approx([19 / 6, 0, 0])
    assert found.read_out[:, 0].tolist() == pytest.approx([28 / 6, -0.5, 3])
    assert sum(found).sum().item() == pytest.approx(11 - 0.5 + 3)


def test_a_change_of_the_read_out_is_blamed_on_no_part(pair, tokens):
    base, tuned = pair
    with torch.no_grad():
        tuned.unembed.W_U[:, WORDS[0]] *= 1.2
    found = split(base, tuned, tokens)
    assert not found.own_weights.any() and not found.inherited.any() and not found.scale.any()
    measured = shift(base, tuned, tokens)
    assert measured.abs().max() > 0.1
    torch.testing.assert_close(found.read_out.sum(0), measured, atol=1e-4, rtol=0)
    # attribution of both models alone charges the parts for it
    acts = [capture_activations(model, tokens, SITES, POS) for model in pair]
    charged = [attribute_logits(m, a, *WORDS).rows for m, a in zip(pair, acts, strict=True)]
    assert (charged[1] - charged[0])[:-2].abs().max() > 0.1


def test_what_an_earlier_part_changed_is_inherited_by_later_ones(pair, tokens):
    base, tuned = pair
    changed(tuned.blocks[0].mlp, seed=0)
    found = split(base, tuned, tokens)
    acts = capture_activations(base, tokens, SITES, POS)
    names = attribute_logits(base, acts, *WORDS).components
    own = {name for name, row in zip(names, found.own_weights, strict=True) if row.any()}
    inherited = {name for name, row in zip(names, found.inherited, strict=True) if row.any()}
    assert own == {"L0 mlp"}
    assert inherited == {"L1 mlp", *(name for name in names if name.startswith("L1H"))}
    assert not found.read_out.any() and found.scale.any()
    torch.testing.assert_close(sum(found).sum(0), shift(base, tuned, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_causes_sum_to_the_shift_and_are_those_of_the_way_back_turned_round(pair, tokens, seed):
    base, tuned = pair
    changed(tuned, seed)
    there, back = split(base, tuned, tokens), split(tuned, base, tokens)
    torch.testing.assert_close(sum(there).sum(0), shift(base, tuned, tokens), atol=1e-4, rtol=0)
    for one, other in zip(there, back, strict=True):
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(one, -other, atol=1e-6, rtol=0)
    assert not any(part.any() for part in split(base, base, tokens))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_models_of_other_kinds_are_split_too(architecture, llama_tokenizer):
    """RMS norms and grouped heads; parallel blocks, whose MLP reads what the attention reads."""
    base = load_model(tiny_of(architecture), llama_tokenizer)
    tuned = copy.deepcopy(base)
    changed(tuned.blocks[0], seed=0)
    tokens = random_tokens()
    found = split(base, tuned, tokens)
    torch.testing.assert_close(sum(found).sum(0), shift(base, tuned, tokens), atol=1e-4, rtol=0)
    first = 1 + base.cfg.n_heads + 2  # embed, heads, b_O, MLP
    assert found.own_weights[1:first].any() and not found.own_weights[first:].any()
    assert found.inherited[first:-2].any()
