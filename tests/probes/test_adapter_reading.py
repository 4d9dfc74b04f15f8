"""AdapterReading: pieces of a run's adapters, their reward, and injected faults."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing.transplant import Writer, prompt_ids
from rlhf_lab.diffing.weights import as_matrix, from_matrix
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import adapters_off, effective_weights, lora_layers
from rlhf_lab.probes import AdapterReading, Record, Run, attach
from rlhf_lab.probes.own_writing import resolve_true_reward, run_prompts, run_sampling
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.looking import SHORT, Trained, sound
from tests.probes.planting import assert_fault_fails

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


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
    row = record.values["pieces"][0]
    layer = int(row["weight"].split(".")[1])
    assert row["weight"].endswith("attn.W_Q")
    read = tensors[f"{row['weight']}.reads"][0] * model.blocks[layer].ln1.w
    words = model.embed.W_E - model.embed.W_E.mean(0)
    cosines = torch.cosine_similarity(words, (read - read.mean())[None])
    best = cosines.abs().argmax()
    assert row["reads_words"][0] == model.tokenizer.decode([best.item()])
    assert row["reads_cos"][0] == pytest.approx(cosines[best].item(), abs=1e-4)


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


ADAPTER, PROBE = "diffing.adapter", "adapter_reading:AdapterReading"
FAULTS = [
    ("plain", f"{ADAPTER}:adapter_pieces", "svd(scale * r_a", "svd(r_a"),
    ("plain", f"{ADAPTER}:adapter_pieces", "reads * sign, writes * sign", "reads, writes * sign"),
    ("plain", f"{PROBE}._described", 'row["s"] ** 2 / energy', 'row["s"] / found.s.sum().item()'),
    ("untied", f"{ADAPTER}:words_read", "exact(model.embed.W_E)", "exact(model.unembed.W_U).T"),
    ("rewards", f"{PROBE}._written", "found[0] - found[1:]", "found[1:] - found[0]"),
]


@pytest.mark.parametrize(("kind", "where", "old", "new"), FAULTS)
def test_injected_fault_fails(kind, where, old, new, run_of):
    run = run_of(kind)
    assert_fault_fails(where, old, new, lambda: check(kind, run))


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(tmp_path, weights_of):
    args = RLHFArgs(**SHORT | {"total_phases": 1, "warmup_steps": 0, "lora_rank": 2})
    plain, probed = (RLHFTrainer(args, out=tmp_path / name) for name in ("plain", "probed"))
    probe = AdapterReading(every=1, removed=1, n=8)
    attachment = attach(probed, probe)
    plain.train(), probed.train()
    assert attachment.notes == []
    found, expected = weights_of(probed.policy), weights_of(plain.policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    run = Run(probed.run.path)
    assert [check for check in run.checks() if not check.ok] == []
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
