"""Records in parts: only the chosen parts are computed."""

import json

import pytest

from tools.course.stored_parts import write_parts


def test_write_parts_computes_the_chosen_part_only(tmp_path):
    """1/3 to two digits is .33; a list of plain values stands on one line."""
    path = tmp_path / "there/record.json"
    parts = {"rows": lambda: {"a": [1 / 3, 2]}, "texts": lambda: [("nice", 0.125)]}
    write_parts(path, {"seeds": (1, 2)}, parts, [], 2)
    text = path.read_text()
    assert json.loads(text) == {
        "seeds": [1, 2],
        "rows": {"a": [0.33, 2]},
        "texts": [["nice", 0.12]],
    }
    assert '"a": [0.33, 2]' in text and '"seeds": [1, 2]' in text
    write_parts(path, {"seeds": (3,)}, {"rows": lambda: 7, "texts": lambda: 1 / 0}, ["rows"], 2)
    assert json.loads(path.read_text()) == {"seeds": [3], "rows": 7, "texts": [["nice", 0.12]]}
    with pytest.raises(KeyError):
        write_parts(path, {}, parts, ["other"], 2)
