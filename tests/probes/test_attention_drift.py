"""AttentionDrift: sums, padding, other architectures."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.probes import AttentionDrift, attach
from rlhf_lab.probes.attention_drift import distance_places, slot_places
from rlhf_lab.probes.text_rows import TextRows
from tests.probes.looking import sound, train_soundly
from tests.tiny_families import tiny_of

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.mark.slow
def test_checks_hold_with_grouped_heads_and_padding(trained_runs):
    record = sound(trained_runs("grouped"), AttentionDrift("w1", "w2", text="rollout", n=16))
    assert record.tensors["own"].abs().max() > 1e-3 and len(record.checks) > 1


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
