"""The rows of the page of results: all that were promised, and each can be typed."""

import pytest

from benchmarks.results.settings import SEEDS, all_rows, command_line, method_rows
from rlhf_lab.__main__ import parse


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in all_rows() if row.part != "algorithms"],
    ids=lambda row: f"{row.part}-{row.name}",
)
def test_what_the_page_says_to_type_gives_the_settings_of_the_run(row):
    words = command_line(row.preset, row.fields).removeprefix("python -m rlhf_lab ").split()
    assert parse([*words, "--seed", "3"]).keywords["args"] == row.args(3)


@pytest.mark.slow
def test_every_method_runs_with_both_kinds_of_weights_and_both_kinds_of_kl_from_five_seeds():
    rows = method_rows()
    # Three critics and four estimators without one; all weights and adapters; two controllers.
    assert len(rows) == (3 + 4) * 2 * 2
    assert {row.args(1).value_head for row in rows} == {"shared", "detached", "separate"}
    estimators = {row.args(1).advantages for row in rows}
    assert estimators == {"gae", "grpo", "rloo", "reinforce++", "remax"}
    for lora in (False, True):
        for controller in ("fixed", "adaptive"):
            chosen = [
                row
                for row in rows
                if (row.args(1).lora_rank > 0) == lora and row.args(1).kl_controller == controller
            ]
            assert len({row.labels[0] for row in chosen}) == 7
    assert all(row.seeds == SEEDS and len(SEEDS) == 5 for row in rows)


def test_no_two_rows_share_a_place():
    places = [(row.part, row.name) for row in all_rows()]
    assert len(set(places)) == len(places)
