"""AttentionDrift: slots and distances of padded rows."""

import torch

from rlhf_lab.probes.attention_drift import distance_places, slot_places
from rlhf_lab.probes.text_rows import TextRows


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
