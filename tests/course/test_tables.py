"""Tables of intervals, as the lessons show them."""

import torch

from rlhf_lab.console import page_console
from rlhf_lab.course import show_intervals
from rlhf_lab.functional import Interval


def interval(value: float, low: float, high: float, n: int = 8) -> Interval:
    return Interval(*(torch.tensor(x, dtype=torch.float64) for x in (value, low, high)), n=n)


def test_estimates_stand_with_their_ends_and_their_n(capsys) -> None:
    unknown = Interval(None, None, None, 8, why="noise")
    alone = Interval(torch.tensor(0.5), None, None, 1)
    columns = {
        "into": {"L0 mlp": interval(0.456, 0.4, 0.5), "L1H0": interval(-0.001, -0.004, 0.02)},
        "out": {"L0 mlp": unknown, "embed": alone},
    }
    show_intervals("part", columns, "reviews")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["part", "into", "out"]
    assert lines[2] == "L0 mlp 0.46 [0.40, 0.50] -".split()
    assert lines[3] == "L1H0 0.00 [0.00, 0.02] -".split()
    assert lines[4] == "embed - 0.50".split()
    said = "95 % intervals, bootstrap over n = 8 (into); 1 to 8 (out) reviews"
    assert " ".join(lines[5]) == said


def test_in_a_notebook_tables_are_no_wider_than_its_page(monkeypatch) -> None:
    """Rich would take 115 columns there, which a page of 1,000 pixels wraps or scrolls."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert page_console().width == 100
    monkeypatch.setenv("JUPYTER_COLUMNS", "80")
    assert page_console().width == 80
