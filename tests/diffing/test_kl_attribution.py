"""KL attribution: completeness, plants whose cause is known, and the two questions apart."""

import copy

import pytest
import torch
from torch import Tensor, nn

from rlhf_lab.diffing.groups import coarse_groups, fine_groups, restrict
from rlhf_lab.diffing.kl_attribution import kl_by_output, kl_by_weights
from rlhf_lab.diffing.weight_line import WeightLine
from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.models import HookedTransformer, load_model
from tests.tiny_families import random_tokens, tiny_of


def noisy(module: nn.Module, scale: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight += (
                scale
                * weight.std().nan_to_num(0.1)
                * torch.randn(weight.shape, generator=generator)
            )


@pytest.fixture
def base(llama_tokenizer) -> HookedTransformer:
    return load_model(tiny_of("GPT2LMHeadModel"), llama_tokenizer)


@pytest.fixture
def tuned(base) -> HookedTransformer:
    changed = copy.deepcopy(base)
    noisy(changed, 0.2)
    return changed


def everywhere(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def measured(base: HookedTransformer, tuned: HookedTransformer, tokens: Tensor) -> Tensor:
    return kl_per_token(*(log_probs(model(tokens).double()) for model in (tuned, base))).sum(1)


def test_one_state_by_hand():
    """Two words, logits (h, 0), h from 0 to 2 by two parts of 1/2 and 3/2; no change of read-out.

    The gradient is the same for both, so that they share the KL as 1 to 3.
    """
    parts0 = torch.zeros(2, 1, 1, dtype=torch.float64)
    parts1 = torch.tensor([0.5, 1.5], dtype=torch.float64)[:, None, None]
    read = lambda h: torch.cat([h, torch.zeros_like(h)], -1)
    found = kl_by_output(parts0, parts1, read, read)
    p = torch.sigmoid(torch.tensor(2.0).double())
    expected = (p * (2 * p).log() + (1 - p) * (2 * (1 - p)).log()).item()
    assert found.kl.item() == pytest.approx(expected, abs=1e-12) and found.read_out.item() == 0
    assert found.rows[:, 0].tolist() == pytest.approx([expected / 4, 3 * expected / 4], abs=1e-7)


def test_groups_of_weights_sum_to_the_kl_and_fine_ones_to_coarse_ones(base, tuned):
    tokens = random_tokens()
    line = WeightLine(base, tuned)
    fine = kl_by_weights(line, fine_groups(base), tokens, everywhere(tokens), rows_at_once=2)
    torch.testing.assert_close(fine.kl, measured(base, tuned, tokens), atol=1e-4, rtol=1e-4)
    assert fine.rows.sum().item() == pytest.approx(fine.kl.sum().item(), rel=1e-3)
    coarse = kl_by_weights(line, coarse_groups(base), tokens, everywhere(tokens))
    heads = [i for i, name in enumerate(fine_groups(base).names) if name.startswith("L1H")]
    parts = heads + [fine_groups(base).names.index(name) for name in ("L1 ln1", "L1 b_O")]
    at = coarse_groups(base).names.index("L1 attn")
    assert fine.rows[parts].sum().item() == pytest.approx(coarse.rows[at].sum().item(), rel=1e-3)


def test_only_what_was_planted_is_charged_by_weights(base):
    changed = copy.deepcopy(base)
    noisy(changed.blocks[0].mlp, 0.5)
    tokens, groups = random_tokens(), coarse_groups(base)
    found = kl_by_weights(WeightLine(base, changed), groups, tokens, everywhere(tokens))
    charged = {name for name, row in zip(groups.names, found.rows, strict=True) if row.any()}
    assert charged == {"L0 mlp"} and found.rows.sum() > 1e-3


def test_a_node_is_the_derivative_along_a_group_s_change(base, tuned):
    tokens, groups, step = random_tokens(), fine_groups(base), 1e-4
    line = WeightLine(base, tuned, in_float64=True)
    found = kl_by_weights(line, groups, tokens, everywhere(tokens), nodes=1)
    middle, reference = line.at(0.5), line.logits(line.before, tokens)
    for name in ("L0H1", "L2 mlp", "unembed", "embed"):
        along = restrict(line.delta, groups, name)
        ends = [
            kl_per_token(
                log_probs(
                    line.logits(
                        middle | {n: middle[n] + sign * step * along[n] for n in along}, tokens
                    )
                ),
                log_probs(reference),
            ).sum()
            for sign in (1, -1)
        ]
        expected = ((ends[0] - ends[1]) / (2 * step)).item()
        at = groups.names.index(name)
        assert found.nodes[0, at].sum().item() == pytest.approx(expected, rel=1e-5)


def test_padding_on_the_left_and_states_that_do_not_count_change_nothing(base, tuned):
    tokens = random_tokens()[:2, :8]
    groups, line = coarse_groups(base), WeightLine(base, tuned)
    plain = kl_by_weights(line, groups, tokens, everywhere(tokens))
    shifted = torch.cat([torch.zeros_like(tokens[:, :3]), tokens], 1)
    real = torch.cat([torch.zeros_like(tokens[:, :3]), torch.ones_like(tokens)], 1).bool()
    padded = kl_by_weights(line, groups, shifted, real, real)
    torch.testing.assert_close(padded.rows, plain.rows, atol=1e-4, rtol=1e-4)
    some = everywhere(tokens) & (torch.arange(8) == 2)
    at_two = kl_by_weights(line, groups, tokens, some)
    expected = kl_per_token(*(log_probs(x(tokens).double()) for x in (tuned, base)))[:, 2]
    torch.testing.assert_close(at_two.kl, expected, atol=1e-5, rtol=1e-4)
