"""AttentionDrift: sums, padding, other architectures, and faults that it must tell."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.probes import AttentionDrift, ReelTruth, Run, attach
from rlhf_lab.probes.attention_places import distance_places, kind_of_token, slot_places
from rlhf_lab.probes.text_rows import TextRows
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.faults_attention_drift import ATTENTION_FAULTS
from tests.probes.looking import failed, look
from tests.probes.planting import planted
from tests.tiny_families import tiny_of

pytestmark = pytest.mark.usefixtures("no_type_checks")


def probe_of(kind: str) -> AttentionDrift:
    words = ("w1", "w2") if kind == "grouped" else ("loved", "hated")
    text = "rollout" if kind == "padded" else "eval"
    at = None if kind != "adapted" else ReelTruth().grammar.slot("VERB") - 1
    return AttentionDrift(*words, pos=at, text=text, n=16)


KINDS = ("adapted", "padded", "grouped")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_check_holds_where_nothing_is_wrong(kind, trained_runs):
    record = look(trained_runs(kind), probe_of(kind))
    assert [check for check in record.checks if not check.ok] == []
    assert record.tensors["own"].abs().max() > 1e-3
    assert all(record.tensors[name].any() for name in ("qk", "ov", "tv"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ATTENTION_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_record_s_own_checks(fault, trained_runs):
    kind = "adapted" if fault.run == "plain" else fault.run
    with planted(fault):
        assert failed(trained_runs(kind), probe_of(kind))


@pytest.mark.slow
def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_beside_one_without):
    probes = AttentionDrift(every=1), AttentionDrift(text="rollout", name="own_text", every=1)
    run = run_beside_one_without(*probes, reviews=8, lora_rank=0)
    assert run.phases("attention_drift") == [0, 1, 2] and run.phases("own_text") == [0, 1]
    html = probe_html(run, "attention_drift")
    assert html.count("<figure") == 4 and "total variation" in html


@pytest.mark.slow
def test_what_an_intervention_changes_behind_the_heads_stands_beside_the_causes(
    make_trainer, reviews
):
    trainer = make_trainer()
    trainer.intervene("blocks.1.attn.hook_z", lambda z, where: z * 0.5, name="half")
    attach(trainer, AttentionDrift(every=1), eval_tokens=reviews[0])
    trainer.train()
    run = Run(trainer.run.path)
    assert all(check.ok for check in run.checks())
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


def test_places_of_padded_rows_by_hand(llama_tokenizer):
    """Two rows of five: the first has two tokens of padding, the second stopped after four."""
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    written = real & torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    tokens = torch.tensor([[0, 0, 1, 5, 6], [1, 5, 6, 7, 0]])
    rows = TextRows(tokens, real, written, written, 3)
    found = slot_places(rows, ["a", "b", "c", "d", "e"])
    assert found.query.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, -1]]
    assert found.key[0, 4].tolist() == [-1, -1, 0, 1, 2]
    assert found.key[1, 2].tolist() == [0, 1, 2, -1, -1]
    back = distance_places(rows, llama_tokenizer)
    names = [[back.key_names[k] if k >= 0 else "" for k in row] for row in back.key[1].tolist()]
    assert names[0] == ["first token", "", "", "", ""]
    assert names[3] == ["first token", "2 back", "1 back", "itself", ""]
    assert back.query_names[back.query[0, 2]] == kind_of_token(1, llama_tokenizer) == "special"
    assert back.query[0, :2].tolist() == [-1, -1]
