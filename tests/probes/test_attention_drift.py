"""AttentionDrift: sums, padding, other architectures."""

import pytest
import torch

from rlhf_lab.diffing.attention import HeadCache, attention_split, pattern_distance
from rlhf_lab.diffing.logit_shift import logit_reader, own_reader
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.probes import AttentionDrift, ReelTruth, attach
from rlhf_lab.probes.attention_drift import distance_places, slot_places
from rlhf_lab.probes.text_rows import TextRows
from tests.probes.looking import row_alone, sound, train_soundly
from tests.tiny_families import tiny_of

pytestmark = pytest.mark.usefixtures("no_type_checks")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
@torch.no_grad()
def test_heads_and_keys_are_those_of_single_texts(kind, trained_runs):
    """And distances are their mean."""
    run, words = trained_runs(kind), ("w1", "w2") if kind == "grouped" else ("loved", "hated")
    pos = ReelTruth().grammar.slot("VERB") - 1 if kind == "adapted" else None
    text = "rollout" if kind == "padded" else "eval"
    probe = AttentionDrift(*words, pos=pos, text=text, n=16)
    record = sound(run, probe)
    stored, models = record.tensors, (run.ctx.reference, run.ctx.policy.base_model)
    encode = models[0].tokenizer.encode
    ids = tuple(encode(word, add_special_tokens=False)[0] for word in (probe.word, probe.other))
    readers = [logit_reader(model, ids) for model in models]
    rows, at = probe.select_rows(run.seen())
    layers, distances = models[0].cfg.n_layers, torch.zeros_like(stored["tv"])
    counts = distances.new_zeros(distances.shape[2])
    assert stored["own"].abs().max() > 1e-3
    for row, column in enumerate(at.tolist()):
        caches = [model.run_with_cache(row_alone(rows, row)[0])[1] for model in models]
        place, n = int(rows.written[row, :column].sum()), int(rows.written[row].sum())
        scales = [1 / cache["ln_final.hook_scale"][:, place, 0].double() for cache in caches]
        reader = own_reader(scales, readers, is_centered(models[0].ln_final))
        counts[:n] += 1
        for layer in range(layers):
            patterns, v, z = (
                [cache[f"blocks.{layer}.attn.hook_{part}"].double() for cache in caches]
                for part in ("pattern", "v", "z")
            )
            W_O = [model.blocks[layer].attn.W_O.double() for model in models]
            wrote = [
                torch.einsum("hd,hdm,m->h", x[0, place], w, reader[0])
                for x, w in zip(z, W_O, strict=True)
            ]
            close(stored["own"][layer, :, row], wrote[1] - wrote[0])
            heads = [
                HeadCache(p[:, :, place, : place + 1], x[:, : place + 1])
                for p, x in zip(patterns, v, strict=True)
            ]
            for cause, expected in attention_split(*heads, *W_O, reader)._asdict().items():
                found = stored[cause][layer, :, :, row]
                if kind == "grouped":  # keys are named by their distance
                    close(found.sum(1), expected[0].sum(1))
                else:
                    close(found[:, : place + 1], expected[0])
            if kind != "grouped":
                distances[layer, :, :n, :n] += pattern_distance(*patterns)[0].float()
    if kind != "grouped":
        close(stored["tv"], distances.double() / counts.clamp(min=1)[:, None].double())
    if kind == "adapted":  # after a prompt of three
        assert record.values["keys"][3:5] == ["OPEN", "COMMA"]
    for cause in ("qk", "ov", "wo"):
        means = stored[cause].sum(2).mean(-1).flatten().tolist()
        assert record.values[cause] == pytest.approx(means, abs=1e-5)


@pytest.mark.slow
def test_what_an_intervention_changes_behind_the_heads_stands_beside_the_causes(
    make_trainer, reviews
):
    trainer = make_trainer()
    trainer.intervene("blocks.1.attn.hook_z", lambda z, where: z * 0.5, name="half")
    attach(trainer, AttentionDrift(every=1), eval_tokens=reviews[0])
    run = train_soundly(trainer)
    first = run.tensors("attention_drift", 0)
    assert not first["qk"].any() and not first["ov"].any() and first["hooks"][1].any()
    assert first["hooks"][0].abs().max() < 1e-5
    torch.testing.assert_close(first["hooks"][1], first["own"][1], atol=1e-5, rtol=0)


def test_models_whose_heads_do_not_add_up_and_other_texts_are_refused(llama_tokenizer):
    model = load_model(tiny_of("Olmo2ForCausalLM"), llama_tokenizer)
    with pytest.raises(ConfigError, match="Remove attention_drift, and look at the residual"):
        AttentionDrift().check_model(model)
    with pytest.raises(ConfigError, match="text='both' of attention_drift must be 'eval' or"):
        AttentionDrift(text="both")


def test_places_of_padded_rows_by_hand():
    """Two rows of five: the first has two tokens of padding, the second stopped after four."""
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    written = real & torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    tokens = torch.tensor([[0, 0, 1, 5, 6], [1, 5, 6, 7, 0]])
    rows = TextRows(tokens, real, written, written, 3)
    found = slot_places(rows, ["a", "b", "c", "d", "e"])
    assert found.query.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, -1]]
    assert found.key[0, 4].tolist() == [-1, -1, 0, 1, 2]
    assert found.key[1, 2].tolist() == [0, 1, 2, -1, -1]
    back = distance_places(rows)
    names = [[back.key_names[k] if k >= 0 else "" for k in row] for row in back.key[1].tolist()]
    assert names[0] == ["first token", "", "", "", ""]
    assert names[3] == ["first token", "2 back", "1 back", "itself", ""]
    assert back.query[0].tolist() == [-1, -1, 0, 0, 0]
