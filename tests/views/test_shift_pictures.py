"""Pictures of a shift: a large model's parts are few enough to read, and still sum to it."""

import pytest
import torch

from rlhf_lab.views.shift_pictures import MOST_PARTS, largest_parts


def shift_of(n_parts: int) -> tuple[dict, dict]:
    """Parts whose shift grows, all but the first, which inherits much and shifts by nothing."""
    rows = torch.arange(n_parts, dtype=torch.float32)[:, None] * torch.tensor([[0.5, 1.5]])
    inherited = torch.zeros_like(rows)
    inherited[0] = 1000
    tensors = {"shift": rows, "reference": 2 * rows, "inherited": inherited, "other": rows}
    record = {"components": [f"part {i}" for i in range(n_parts)], "measured_shift": 1.0}
    record |= {name: tensors[name].mean(1).tolist() for name in ("shift", "reference", "inherited")}
    return record | {"policy": (3 * rows).mean(1).tolist()}, tensors


def test_the_largest_parts_are_kept_in_their_order_and_all_others_are_one():
    record, tensors = shift_of(100)
    fewer, rows = largest_parts(record, tensors)
    assert len(fewer["components"]) == MOST_PARTS == len(rows["shift"])
    assert fewer["components"][0] == "part 0"
    assert fewer["components"][1:-1] == [f"part {i}" for i in range(78, 100)]
    assert fewer["components"][-1] == "77 others"
    assert fewer["shift"][-1] == sum(range(1, 78))
    for field in ("shift", "reference", "inherited", "policy"):
        assert sum(fewer[field]) == pytest.approx(sum(record[field]))
    torch.testing.assert_close(rows["shift"].sum(0), tensors["shift"].sum(0))
    assert rows["other"] is tensors["other"] and record["components"][1] == "part 1"


def test_few_parts_are_left_as_they_are():
    record, tensors = shift_of(MOST_PARTS)
    assert largest_parts(record, tensors) == (record, tensors)
