"""Rank-1 pieces of adapters: hand-computed pieces, and what they read and write."""

import pytest
import torch

from rlhf_lab.models import add_lora, effective_weights, load_model, lora_layers
from rlhf_lab.probes.adapter_reading import (
    adapter_pieces,
    before_norm,
    reading_side,
    upstream_writers,
    without_piece,
    writing_side,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def test_pieces_match_hand_computed():
    """3 e0 e1' - 2 e4 e2', from factors that are mixed by a matrix; the scale is 2."""
    model = load_model("reel-nano")
    add_lora(model, rank=2, alpha=4.0, targets=("W_in",))
    adapter = lora_layers(model)["blocks.0.mlp.W_in"]
    A, B, mix = torch.zeros(64, 2), torch.zeros(2, 256), torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    A[0, 0] = A[4, 1] = 1.0
    B[0, 1], B[1, 2] = 3.0, -2.0
    adapter.A.data.copy_(A @ mix)
    adapter.B.data.copy_(torch.linalg.inv(mix) @ B / 2)
    found = adapter_pieces(adapter)
    assert found.s.tolist() == pytest.approx([3, 2])
    assert found.writes[0, 1] == pytest.approx(1) and found.reads[0, 0] == pytest.approx(1)
    # signs such that the largest written entry is positive
    assert found.writes[1, 2] == pytest.approx(1) and found.reads[1, 4] == pytest.approx(-1)


@torch.no_grad()
def test_injected_words_heads_and_neurons_are_named():
    model = load_model("reel-nano")
    model.unembed.W_U.copy_(model.unembed.W_U.flip(1))  # untie it from the embedding
    encode = model.tokenizer.encode
    read, written = (encode(x, add_special_tokens=False)[0] for x in ("plot", "loved"))
    reads = model.embed.W_E[read] - model.embed.W_E.mean(0)
    reads = (reads - reads.mean()) / model.blocks[1].ln2.w
    writes = model.unembed.W_U[:, written] - model.unembed.W_U.mean(1)
    name, found = reading_side(model, "blocks.1.mlp.W_in", reads.double())
    assert name == "residual"
    words = model.embed.W_E - model.embed.W_E.mean(0)
    assert torch.cosine_similarity(found, words).argmax() == read
    name, found = writing_side(model, "blocks.1.mlp.W_out", writes.double())
    assert name == "residual" and found.equal(writes.double())
    found = before_norm(model.ln_final, writes.double() / model.ln_final.w.double())
    torch.testing.assert_close(found, writes.double() - writes.double().mean())
    head = torch.zeros(64, dtype=torch.float64)
    head[32:48] = torch.arange(1.0, 17)
    name, direction = writing_side(model, "blocks.1.attn.W_V", head)
    assert name == "values of L1H2"
    torch.testing.assert_close(direction, head[32:48] @ model.blocks[1].attn.W_O[2].double())
    assert writing_side(model, "blocks.1.attn._W_K", head)[0] == "keys of L1H2"
    assert reading_side(model, "blocks.1.attn.W_O", head)[0] == "values of L1H2"
    assert reading_side(model, "blocks.0.mlp.W_out", head) == ("neuron 47", None)


@torch.no_grad()
def test_upstream_writers_find_the_head_that_writes_a_direction():
    model = load_model("reel-nano")
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1)).double()
    model.blocks[0].attn.W_O[3] = torch.outer(torch.ones(16), direction.float())
    found = upstream_writers(model, "blocks.1.attn.W_Q", direction)
    assert max(found, key=found.get) == "L0H3" and found["L0H3"] == pytest.approx(64, rel=1e-4)
    assert set(found) == {"embed", "pos_embed", "L0H0", "L0H1", "L0H2", "L0H3", "L0 mlp"}
    assert set(upstream_writers(model, "blocks.0.attn.W_Q", direction)) == {"embed", "pos_embed"}
    assert "L0H0" in upstream_writers(model, "blocks.0.mlp.W_in", direction)


@torch.no_grad()
def test_weight_without_its_pieces_is_the_frozen_weight():
    model, name = load_model("reel-nano"), "blocks.1.attn.W_Q"
    add_lora(model, rank=2, alpha=4.0, targets=("W_Q",))
    before = effective_weights(model)[name].clone()
    adapter = lora_layers(model)[name]
    for factor in (adapter.A, adapter.B):
        factor.data.normal_(generator=torch.Generator().manual_seed(0))
    weight, pieces = effective_weights(model)[name], adapter_pieces(adapter)
    assert (weight - before).abs().max() > 0.1
    for index in range(2):
        weight = without_piece(name, weight, pieces, index)
    torch.testing.assert_close(weight, before, atol=1e-5, rtol=1e-4)
