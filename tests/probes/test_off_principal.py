"""Leading directions of weights: hand-computed fractions, random changes, grouped heads."""

import pytest
import torch

from rlhf_lab.models import effective_weights, load_model
from rlhf_lab.probes.off_principal import (
    Factored,
    chance_share,
    energy_blocks,
    head_products,
    principal_spaces,
    product_spaces,
    random_factor_shares,
    random_shares,
)
from tests.tiny_families import tiny_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def test_energy_blocks_match_hand_computed():
    diagonal = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    wide, tall = principal_spaces(diagonal, 1), principal_spaces(diagonal.T, 1)
    assert [x.abs().flatten().tolist() for x in wide] == [[1, 0], [1, 0, 0]]
    assert [x.abs().flatten().tolist() for x in tall] == [[1, 0, 0], [1, 0]]
    # squares 1, 4, 9 in the first row and 16, 25, 36 in the second: 91 in total
    delta = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    blocks = energy_blocks(delta, wide) * 91
    assert blocks.tolist() == [pytest.approx([1, 4 + 9]), pytest.approx([16, 25 + 36])]
    assert energy_blocks(torch.zeros(2, 3), wide).isnan().all()


def mean_and_error(draws: torch.Tensor) -> tuple[float, float]:
    return draws.mean().item(), draws.std().item() / len(draws) ** 0.5


@pytest.mark.parametrize("rank", [1, 9])
def test_random_changes_match_expected_fraction(rank):
    generator = torch.Generator().manual_seed(3)
    delta = torch.randn(15, rank, generator=generator) @ torch.randn(rank, 9, generator=generator)
    mean, error = mean_and_error(random_shares(delta, 3, 600, generator))
    expected = chance_share(15, 9, 3)
    assert expected == 9 / (15 * 9) and abs(mean - expected) < 4 * error < 0.4 * expected


def test_random_changes_of_one_factor_stay_in_the_other():
    """With A of 2 columns and k = 2, A dB is inside on the left; on the right, 2/9 on average."""
    generator = torch.Generator().manual_seed(4)
    A, B, dB = (
        torch.randn(shape, generator=generator).double() for shape in ((15, 2), (2, 9), (2, 9))
    )
    before, after = Factored(A, B), Factored(A, B + 0.01 * dB)
    spaces = product_spaces(before, 2)
    mean, error = mean_and_error(random_factor_shares(before, after, spaces, 600, generator))
    assert abs(mean - 2 / 9) < 4 * error < 0.2
    assert energy_blocks(before.product(), spaces)[0, 0] == pytest.approx(1)


def test_products_of_grouped_heads_share_keys_and_values(llama_tokenizer):
    hooked = load_model(tiny_of("LlamaForCausalLM"), llama_tokenizer)
    found, attn = head_products(effective_weights(hooked), hooked), hooked.blocks[0].attn
    assert len(found) == 2 * hooked.cfg.n_layers * hooked.cfg.n_heads
    for head in range(hooked.cfg.n_heads):
        pairs = {"OV": (attn.W_V, attn.W_O), "QK": (attn.W_Q, attn.W_K.mT)}
        for kind, (first, second) in pairs.items():
            expected = first[head].double() @ second[head].double()
            torch.testing.assert_close(found[f"L0H{head} {kind}"].product(), expected)
