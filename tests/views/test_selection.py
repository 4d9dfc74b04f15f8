"""The best of many cells: its interval, among how many it was selected, and what is not there."""

from rlhf_lab.views.probe_drawings import best_cell

RECORD = {
    "held_out": 40,
    "r2_low": [[0.1, 0.5], [0.2, None]],
    "r2_high": [[0.3, 0.9], [0.8, None]],
}
GRID = [[0.2, 0.7], [0.6, None]]


def test_it_names_the_best_its_interval_and_how_many_were_compared():
    assert best_cell(RECORD, "r2", GRID, ["0 pre", "1 <post"], ["A", "B"]) == (
        "<p>Best of the 3 compared: 0.70 [0.50, 0.90] at 0 pre, B (95 %, bootstrap over 40 "
        "held-out sequences); the widest interval of all is 0.60 wide.</p>"
    )
    worse = [[0.2, 0.1], [0.6, None]]
    assert "0.60 [0.20, 0.80] at 1 &lt;post, A" in best_cell(
        RECORD, "r2", worse, ["0 pre", "1 <post"], ["A", "B"]
    )


def test_a_best_cell_without_an_interval_says_so():
    found = best_cell(RECORD, "r2", [[0.2, 0.7], [0.6, 0.8]], ["a", "b"], ["A", "B"])
    assert found.startswith("<p>Best of the 4 compared: 0.80 no interval at b, B")


def test_runs_of_earlier_versions_and_empty_grids_have_no_sentence():
    assert best_cell({}, "r2", GRID, ["a", "b"], ["A", "B"]) == ""
    one = RECORD | {"r2_low": None, "r2_high": None}
    assert best_cell(one, "r2", GRID, ["a", "b"], ["A", "B"]) == ""
    assert best_cell(RECORD, "r2", [[None]], ["a"], ["A"]) == ""
