"""The split of a logit shift: hand-computed, changes of known cause, and other architectures."""

import copy

import pytest
import torch
from torch import Tensor

from rlhf_lab.diffing.logit_shift import ModelEnd, ShiftCauses, ends_of, split_shift
from rlhf_lab.models import HookedTransformer, load_model
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.probes.logit_shift import SITES, attribute_logits
from rlhf_lab.training.capture import capture_activations
from tests.tiny_families import random_tokens, tiny_of

WORDS, POS = (5, 9), -3


def split(before: HookedTransformer, after: HookedTransformer, tokens: Tensor) -> ShiftCauses:
    """Split, and compare the sum with the shift of the models' logits."""
    models = before, after
    acts = tuple(capture_activations(model, tokens, SITES, POS) for model in models)
    ends = ends_of(models, acts, tokens, POS, WORDS)
    found = split_shift(*ends, is_centered(before.ln_final))
    shift = after(tokens)[:, POS].double() - before(tokens)[:, POS].double()
    expected = shift[:, WORDS[0]] - shift[:, WORDS[1]]
    torch.testing.assert_close(sum(found).sum(0), expected, atol=1e-4, rtol=0)
    return found


def test_split_matches_hand_computed():
    """k from 1 to 2, q from 1 to 3, s from 1 to 2: 1 becomes 12, a shift of 11.

    X00 = 1, X01 = 3, X10 = 2, X11 = 6; s0/3 + s1/6 = 2/3 and s1/3 + s0/6 = 5/6.
    own      = (2 - 1) 2/3 + (6 - 3) 5/6 = 19/6
    read-out = (3 - 1) 2/3 + (6 - 2) 5/6 = 28/6
    scale    = 1/3 + 6/3 + (3 + 2)/6     = 19/6
    With the tuned weights on the base's streams k is 1.25, the other way round 1.5: the weights
    move it by ((1.25 - 1) + (2 - 1.5)) / 2 = 0.375 of 1, its input by the rest.
    """
    number = lambda x: torch.tensor([[[x]]], dtype=torch.float64)
    one = lambda *x: torch.tensor(x, dtype=torch.float64)
    before = ModelEnd(number(1.0), number(1.5), one(1.0), one(1.0), one(0.5, 1.0))
    after = ModelEnd(number(2.0), number(1.25), one(2.0), one(3.0), one(0.0, 4.0))
    found = split_shift(before, after, centered=False)
    assert found.own_weights[:, 0].tolist() == pytest.approx([0.375 * 19 / 6, 0, 0])
    assert found.inherited[:, 0].tolist() == pytest.approx([0.625 * 19 / 6, 0, 0])
    assert found.scale[:, 0].tolist() == pytest.approx([19 / 6, 0, 0])
    assert found.read_out[:, 0].tolist() == pytest.approx([28 / 6, -0.5, 3])


def test_later_components_inherit_a_changed_mlp(base, make_tuned, reviews):
    found = split(base, make_tuned(base, lambda name: "blocks.0.mlp" in name), reviews)
    acts = capture_activations(base, reviews, SITES, POS)
    names = attribute_logits(base, acts, *WORDS).components
    changed = lambda rows: {name for name, row in zip(names, rows, strict=True) if row.any()}
    assert changed(found.own_weights) == {"L0 mlp"}
    heads = {name for name in names if name.startswith("L1H")}
    assert changed(found.inherited) == {"L1 mlp", *heads}
    assert not found.read_out.any() and found.scale.any()
    found = split(base, make_tuned(base, lambda name: "blocks.0.attn" in name), reviews)
    assert "L0 mlp" in changed(found.inherited) and "L0 mlp" not in changed(found.own_weights)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_split_is_complete_for_rms_norms_and_parallel_blocks(architecture, llama_tokenizer):
    base = load_model(tiny_of(architecture), llama_tokenizer)
    tuned = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in tuned.blocks[0].parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += 0.1 * weight.abs().mean() * noise
    found = split(base, tuned, random_tokens())
    first = 1 + base.cfg.n_heads + 2  # embed, heads, b_O, MLP
    assert found.own_weights[1:first].any() and not found.own_weights[first:].any()
    assert found.inherited[first:-2].any()
