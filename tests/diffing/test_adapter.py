"""Pieces of LoRA adapters: planted ones are found, whatever factors they were given as."""

import pytest
import torch

from rlhf_lab.diffing.adapter import (
    adapter_pieces,
    reading_side,
    upstream_writers,
    words_read,
    words_written,
    writing_side,
)
from rlhf_lab.models import add_lora, load_model, lora_layers


@pytest.fixture
def adapted():
    model = load_model("reel-nano")
    add_lora(model, rank=2, alpha=4.0, targets=("W_in", "W_V", "W_O", "W_out", "W_Q"))
    return model


def fill(adapter, A, B):
    """Give an adapter the change A B: its own scale of 2 is taken out of B."""
    adapter.A.data.copy_(A)
    adapter.B.data.copy_(B / 2)


def word(model, text):
    return model.tokenizer.encode(text, add_special_tokens=False)[0]


def test_pieces_by_hand(adapted):
    """3 e0 e1' + 2 e4 e2': these are its singular vectors. The factors are mixed by a matrix."""
    adapter = lora_layers(adapted)["blocks.0.mlp.W_in"]
    A, B = torch.zeros(64, 2), torch.zeros(2, 256)
    A[0, 0] = A[4, 1] = 1.0
    B[0, 1], B[1, 2] = 3.0, -2.0
    mix = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    fill(adapter, A @ mix, torch.linalg.inv(mix) @ B)
    found = adapter_pieces(adapter)
    assert found.s.tolist() == pytest.approx([3, 2])
    assert found.writes[0, 1] == pytest.approx(1) and found.reads[0, 0] == pytest.approx(1)
    # the sign by which what is written is positive
    assert found.writes[1, 2] == pytest.approx(1) and found.reads[1, 4] == pytest.approx(-1)
    torch.testing.assert_close(found.summed().float(), A @ B)
    torch.testing.assert_close((found.piece(0) + found.piece(1)).float(), A @ B)


@torch.no_grad()
def test_a_planted_piece_is_told_by_its_words(adapted):
    """Written along a word's unembedding, and read along another's embedding, behind the norms."""
    read, written = word(adapted, "plot"), word(adapted, "loved")
    adapted.unembed.W_U.copy_(adapted.unembed.W_U.flip(1))  # else it is the embedding's
    W_E, W_U = adapted.embed.W_E, adapted.unembed.W_U
    apart = W_E[read] - W_E.mean(0)
    apart = apart - apart.mean()
    gain = getattr(adapted.blocks[1].ln2, "w", torch.ones(64))
    side = reading_side(adapted, "blocks.1.mlp.W_in", (apart / gain).double())
    assert side.name == "residual"
    assert words_read(adapted, side.direction).argmax() == read
    up = W_U[:, written] - W_U.mean(1)
    end = writing_side(adapted, "blocks.1.mlp.W_out", up.double())
    assert end.name == "residual"
    assert words_written(adapted, end.direction).argmax() == written


@torch.no_grad()
def test_heads_and_neurons_are_named(adapted):
    attn = adapted.blocks[1].attn
    write = torch.zeros(64, dtype=torch.float64)
    write[2 * 16 : 3 * 16] = torch.randn(16, generator=torch.Generator().manual_seed(0))
    side = writing_side(adapted, "blocks.1.attn.W_V", write)
    assert side.name == "values of L1H2"
    torch.testing.assert_close(side.direction, write[32:48] @ attn.W_O[2].double())
    assert writing_side(adapted, "blocks.1.attn.W_Q", write).name == "queries of L1H2"
    assert reading_side(adapted, "blocks.1.attn.W_O", write).name == "values of L1H2"
    neuron = torch.zeros(256, dtype=torch.float64)
    neuron[17] = -1
    assert reading_side(adapted, "blocks.0.mlp.W_out", neuron) == ("neuron 17", None)


@torch.no_grad()
def test_the_writer_that_writes_along_a_direction_is_first(adapted):
    """L0H3 is made to write along one direction alone: all of its energy, 64 times chance."""
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1)).double()
    unit = (direction / direction.norm()).float()
    adapted.blocks[0].attn.parametrizations["W_O"].original[3] = torch.outer(torch.ones(16), unit)
    found = upstream_writers(adapted, "blocks.1.attn.W_Q", direction)
    assert max(found, key=found.get) == "L0H3" and found["L0H3"] == pytest.approx(64, rel=1e-4)
    assert set(found) == {"embed", "pos_embed", "L0H0", "L0H1", "L0H2", "L0H3", "L0 mlp"}
    assert set(upstream_writers(adapted, "blocks.0.attn.W_Q", direction)) == {"embed", "pos_embed"}
    assert "L0H0" in upstream_writers(adapted, "blocks.0.mlp.W_in", direction)
    assert "L1H0" in upstream_writers(adapted, "blocks.1.mlp.W_in", direction)
