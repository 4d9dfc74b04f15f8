"""Helpers for pictures of records, compared with hand-computed ones."""

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.views.probe_curves import OVER_PHASES, optimum_note
from rlhf_lab.views.records import Snapshot, curves_over, record_bars, row_table, strip
from tests.views.test_probe_views import drawn, made, titles


def test_bars_keep_the_largest_and_sum_the_others():
    at = made("Direction")[1]
    picture = record_bars(at, "t", list("abc"), {"x": [1.0, -3.0, 2.0]}, top=2)
    assert picture.labels == ["b", "c"] and picture.series == {"x": [-3.0, 2.0]}
    assert "1 others sum to x +1." in picture.note


def test_curves_have_the_bands_of_their_phases():
    bands = {"mean_reward": {2: (0.0, 1.0), 3: (2.0, 3.0)}}
    picture = curves_over(made("RunHealth"), "t", "mean_reward", bands=bands)
    assert picture.ends == {"mean reward": ([0.0, 2.0], [1.0, 3.0])}


def test_strips_and_tables_keep_the_largest_known():
    record = {"phase": 3, "tokens": [["p", "a"], ["p", "b"]], "mask": [[True], [False]]}
    record["rows"] = [{"n": 1.0}, {"n": -3.0}]
    at = Snapshot(made("Direction")[1].run, "probe", record)
    (row,) = strip(at, "t", [[1.0], [-5.0]], top=1, rewards=(7.0, 9.0)).rows
    assert row[0] == "text 0, reward 7" and row[2] == [None, 1.0]
    assert row_table(at, "t", "rows", "n", 1).rows == [[-3.0]]


def test_undefined_r2_is_blank_and_refitted_is_frozen_minus_gap():
    pictures, at = drawn("ValueLens")
    assert not [t for t in titles(pictures) if t.startswith(f"s0, B: {at['r2'][0][1]:.9g}")]
    pictures, at = drawn("FrozenProbe")
    refitted = at["accuracy_frozen"][1] - at["gap"][1]
    assert f"refitted, phase 3: {refitted:.9g}" in titles(pictures)


def test_a_line_of_the_optimum_that_ends_is_explained():
    first, last = made("RunHealth")
    assert optimum_note([first, last]).endswith("divided by.")
    last.record["optimal_reward"] = None
    assert "no point in phase 3: beta_eff was not above 0.001" in optimum_note([first, last])
    del first.record["optimal_reward"], last.record["optimal_reward"]
    assert optimum_note([first, last]) == ""


def test_intervals_of_the_terms_of_a_step_have_their_weights():
    """Both sequences are equal, so that both ends are the mean times the coefficient."""
    at = made("StepLedger")[1]
    at.tensors.update({name: torch.ones(2, 2) for name in at.tensors})
    at.tensors |= {"mask": torch.ones(2, 2, dtype=torch.bool), "kl": torch.full((2, 2), 0.25)}
    at.tensors["entropy"] = torch.full((2, 2), 3.0)
    at.run.args = RLHFArgs(preset="reel", ent_coef=0.125)
    at.record["kl_coef"] = 0.75
    (table,) = OVER_PHASES["StepLedger"]([at])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["+ entropy bonus"] == f"{at['entropy_bonus']:.4g} [0.375, 0.375]"
    assert row["− KL penalty"] == f"{at['kl_penalty']:.4g} [0.188, 0.188]"
    assert row["− value loss"] == f"{at['value_loss']:.4g} [4, 4]"
