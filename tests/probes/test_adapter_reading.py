"""AdapterReading: hand-computed pieces, a run's adapters and rewards."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.diffing.transplant import Writer, prompt_ids
from rlhf_lab.diffing.weights import as_matrix, from_matrix
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import adapters_off, add_lora, effective_weights, load_model, lora_layers
from rlhf_lab.probes import AdapterReading, Record, attach
from rlhf_lab.probes.adapter_reading import (
    AdapterPieces,
    adapter_pieces,
    reading_side,
    upstream_writers,
    writing_side,
)
from rlhf_lab.probes.own_writing import resolve_true_reward, run_prompts, run_sampling
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.looking import Trained, sound

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
    read, written = (
        model.tokenizer.encode(x, add_special_tokens=False)[0] for x in ("plot", "loved")
    )
    reads = model.embed.W_E[read] - model.embed.W_E.mean(0)
    reads = (reads - reads.mean()) / model.blocks[1].ln2.w
    writes = model.unembed.W_U[:, written] - model.unembed.W_U.mean(1)
    pieces = AdapterPieces(torch.ones(1).double(), reads[None].double(), writes[None].double())
    row = AdapterReading()._described(model, "blocks.1.mlp.W_in", pieces, 0)
    assert row["reads"] == "residual" and row["reads_words"][0] == "plot"
    row = AdapterReading()._described(model, "blocks.1.mlp.W_out", pieces, 0)
    assert row["writes"] == "residual" and row["writes_words"][0] == "loved"
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


def probe_of(kind: str) -> AdapterReading:
    return AdapterReading(removed=2, n=24) if kind == "rewards" else AdapterReading()


@pytest.fixture(scope="module")
def run_of(trained_runs) -> Callable[[str], Trained]:
    """A run with adapters: on Reel, paid by its own reward, which varies with every word, or with
    an unembedding that is not the embedding's.
    """
    run = trained_runs("adapted")
    model = copy.deepcopy(run.ctx.policy.base_model)
    with torch.no_grad():
        model.unembed.W_U.copy_(model.unembed.W_U.flip(1))
    parts = vars(run.ctx) | {"policy": SimpleNamespace(base_model=model)}
    untied = run._replace(ctx=SimpleNamespace(**parts))
    runs = {"plain": run, "rewards": run._replace(truth=None), "untied": untied}
    return runs.__getitem__


def assert_pieces(run: Trained, record: Record) -> None:
    """Compare stored pieces with the changes of the weights, and words with cosines by hand."""
    model, tensors = run.ctx.policy.base_model, record.tensors
    after = effective_weights(model)
    with adapters_off(model):
        before = effective_weights(model)
    for name in lora_layers(model):
        s, reads, writes = (tensors[f"{name}.{field}"] for field in ("s", "reads", "writes"))
        delta = as_matrix(name, after[name] - before[name])
        torch.testing.assert_close((reads.T * s) @ writes, delta, atol=1e-6, rtol=1e-3)
        rows = [row for row in record.values["pieces"] if row["weight"] == name]
        energy = delta.square().sum().item()
        assert [row["share"] * energy for row in rows] == pytest.approx(
            s.square().tolist(), rel=1e-2
        )
    words = model.embed.W_E - model.embed.W_E.mean(0)
    queries = [row for row in record.values["pieces"] if row["weight"].endswith("attn.W_Q")]
    for row in queries:  # the cosines of some are negative
        block = model.blocks[int(row["weight"].split(".")[1])]
        read = tensors[f"{row['weight']}.reads"][row["piece"]] * block.ln1.w
        cosines = torch.cosine_similarity(words, (read - read.mean())[None])
        best = cosines.abs().argmax()
        assert row["reads_words"][0] == model.tokenizer.decode([best.item()])
        assert row["reads_cos"][0] == pytest.approx(cosines[best].item(), abs=1e-4)
    assert min(row["reads_cos"][0] for row in queries) < 0


def assert_written(run: Trained, record: Record) -> None:
    """Write the texts again, with the same noise, whole and without the strongest piece."""
    seen, model = run.seen(), run.ctx.policy.base_model
    row = record.values["pieces"][record.values["removed"][0]]
    name, index = row["weight"], row["piece"]
    read, write = (record.tensors[f"{name}.{side}"][index] for side in ("reads", "writes"))
    weights = effective_weights(model)
    left = as_matrix(name, weights[name]) - row["s"] * torch.outer(read, write)
    without = weights | {name: from_matrix(name, left, weights[name])}
    writer = Writer(
        model, prompt_ids(model, run_prompts(seen), 24), run_sampling(seen), seen.args.seed
    )
    texts = [writer.write(each).texts(writer.tokenizer) for each in (weights, without)]
    found = torch.stack([resolve_true_reward(seen)(each).float() for each in texts])
    assert (found - record.tensors["rewards"][:2]).abs().max() < 1e-5
    turned = [a != b for a, b in zip(*texts, strict=True)]
    assert record.tensors["turned"][0].tolist() == turned


def check(kind: str, run: Trained) -> None:
    record = sound(run, probe_of(kind))
    assert_pieces(run, record)
    pieces = record.values["pieces"]
    assert len(pieces) == 4 * 5 * 2  # rank, targets, layers
    assert all(row["s"] > 0 for row in pieces)
    if kind == "rewards":
        rewards = record.tensors["rewards"]
        assert rewards.shape == (3, 24) and rewards.std() > 0 and record.tensors["turned"].any()
        assert pieces[record.values["removed"][0]]["s"] == max(row["s"] for row in pieces)
        lost = rewards[0].mean() - rewards[1:].mean(1)
        assert record.values["earned"] == pytest.approx(lost.tolist(), abs=1e-5)
        assert_written(run, record)


@pytest.mark.parametrize("kind", ["plain", "rewards", "untied"])
def test_a_record_agrees_with_the_weights(kind, run_of):
    check(kind, run_of(kind))


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_with_and_without):
    short = {"total_phases": 1, "warmup_steps": 0, "lora_rank": 2}
    run = run_with_and_without(AdapterReading(every=1, removed=1, n=8), **short)
    first, last = run.records("adapter_reading")
    assert {row["share"] for row in first["pieces"]} == {None} and first["earned"] == [0.0]
    html = probe_html(run, "adapter_reading")
    assert html.count("<figure") == 2 and "n = 8" in html
    assert last["pieces"][0]["reads_words"][0] in html


def test_what_it_cannot_read_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="words=0"):
        AdapterReading(words=0)
    with pytest.raises(ConfigError, match="has none; train with lora_rank="):
        attach(make_trainer(), AdapterReading())
    trainer = make_trainer({"prompts": ["this movie", "this film"]}, lora_rank=2)
    attach(trainer, AdapterReading(name="pieces"))
    with pytest.raises(ConfigError, match="its own prompts"):
        attach(trainer, AdapterReading(removed=1))
