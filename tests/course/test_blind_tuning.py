"""Blind tuning: fields are checked, runs are scored and ranked, and the leaderboard is kept."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rlhf_lab.course import blind_tuning, leaderboard, tuned_run
from rlhf_lab.course.blind_tuning import BlindTuning, place
from rlhf_lab.course.leaderboard import (
    TuningRow,
    add_to_leaderboard,
    leaderboard_path,
    read_leaderboard,
)
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.course.tuned_run import (
    HIDDEN,
    PRESET_FIELDS,
    REVIEWS,
    TUNING_SETTINGS,
    UnfitFields,
    check_fields,
    hidden_reward,
    true_reward_frontier,
)
from rlhf_lab.errors import RunError

FIELDS = {"kl_coef": 0.1, "base_lr": 1e-3, "total_phases": 12, "batch_size": 128}
FOUND = {
    "reward": 0.8,
    "true_reward": 0.95,
    "true_reward_low": 0.93,
    "true_reward_high": 0.97,
    "kl": 1.5,
}
REACHED = FOUND | {"excess_kl": 0.9}


@pytest.fixture(autouse=True)
def own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_LAB_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that reach the same figures without training; the rewards they were asked for."""
    asked = []

    def figures(reward_fn, fields):
        asked.append(reward_fn)
        return REACHED

    monkeypatch.setattr(blind_tuning, "tuned_figures", figures)
    return asked


def row(name: str = "Ada", **changed) -> TuningRow:
    return TuningRow(**{"name": name, **FIELDS, **REACHED, **changed})


@pytest.mark.parametrize("name", ["", "  ", None, 3, "n" * 41])
def test_a_name_that_cannot_be_a_seed_is_refused(name) -> None:
    with pytest.raises(UnfitFields, match="give a text of 1 to 40 characters"):
        BlindTuning(name)


def test_a_name_stands_for_one_reward_however_it_is_written() -> None:
    assert hidden_reward("Ada  Lovelace") == hidden_reward(" ada lovelace ")
    drawn = Counter(hidden_reward(f"learner {i}") for i in range(500))
    assert set(drawn) == set(HIDDEN) and min(drawn.values()) > 60  # 100 of each expected


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kl_coef": -0.1}, "kl_coef is -0.1; give a number that is 0 or greater"),
        ({"kl_coef": "0.1"}, "kl_coef is '0.1'; give a number"),
        ({"kl_coef": True}, "kl_coef is True; give a number"),
        ({"base_lr": 0.0}, "base_lr is 0.0; give a number that is above 0"),
        ({"base_lr": float("nan")}, "base_lr is nan; give a number"),
        ({"base_lr": float("inf")}, "base_lr is inf; give a number"),
        ({"total_phases": 0}, "total_phases is 0; give a whole number of 1 or more"),
        ({"total_phases": 2.0}, "total_phases is 2.0; give a whole number"),
        ({"batch_size": True}, "batch_size is True; give a whole number"),
        ({"batch_size": 126}, "batch_size is 126; give a multiple of 4"),
        ({"total_phases": 13}, "total_phases [*] batch_size is 1664; lower one of them"),
    ],
)
def test_fields_that_no_run_can_have_are_told_in_one_sentence(changed, says) -> None:
    with pytest.raises(UnfitFields, match=says) as told:
        check_fields(FIELDS | changed)
    assert told.value._render_traceback_() == [str(told.value)]


def test_the_edges_of_the_fields_are_allowed() -> None:
    check_fields(FIELDS | {"kl_coef": 0})
    check_fields({"kl_coef": 0.3, "base_lr": 1, "total_phases": REVIEWS // 4, "batch_size": 4})
    check_fields(PRESET_FIELDS)


def test_fields_are_refused_before_a_run_begins(untrained: list[str]) -> None:
    with pytest.raises(UnfitFields):
        BlindTuning("Ada").run(**FIELDS | {"base_lr": -1})
    assert untrained == [] and not leaderboard_path().exists()


def test_a_run_that_breaks_down_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(reward_fn, fields):
        raise RunError("kl_per_sequence is nan in phase 3; lower the learning rates.")

    monkeypatch.setattr(blind_tuning, "tuned_figures", broken)
    with pytest.raises(UnfitFields, match="is nan in phase 3"):
        BlindTuning("Ada").run(**FIELDS)
    assert not read_leaderboard()


def test_the_same_run_again_replaces_its_row(untrained: list[str], capsys) -> None:
    tuning = BlindTuning("Ada")
    tuning.run(**FIELDS)
    BlindTuning(" ADA ").run(**FIELDS)
    assert [one.name for one in read_leaderboard()] == ["ADA"]
    tuning.run(**FIELDS | {"kl_coef": 0.2})
    assert len(read_leaderboard()) == 2 and untrained == [hidden_reward("ada")] * 3
    said = capsys.readouterr().out
    assert "exact optimum" in said and "preset, seed 3" in said and "n = 512 reviews" in said
    assert hidden_reward("ada") == tuning.reveal()


def test_the_board_does_not_name_the_reward_and_lists_no_other(untrained, capsys) -> None:
    mine, names = hidden_reward("Ada"), [f"learner {i}" for i in range(20)]
    other = next(name for name in names if hidden_reward(name) != mine)
    same = next(name for name in names if hidden_reward(name) == mine)
    add_to_leaderboard(row(other))
    add_to_leaderboard(row(same))
    BlindTuning("Ada").run(**FIELDS | {"kl_coef": 0})
    said = capsys.readouterr().out
    assert same in said and other not in said and mine not in said
    assert "exact optimum" not in said  # there is none at the price 0


def test_runs_that_reach_the_true_reward_rank_by_excess_kl() -> None:
    """.9 is reached; below it the true reward decides, and an undefined excess does not help."""
    rows = [
        row("b", true_reward=0.95, excess_kl=0.4),
        row("a", true_reward=0.9, excess_kl=0.1),
        row("c", true_reward=0.9995, excess_kl=None),
        row("d", true_reward=0.89, excess_kl=0.01),
        row("e", true_reward=0.3, excess_kl=None),
    ]
    assert [one.name for one in sorted(reversed(rows), key=place)] == list("abcde")


def test_a_run_is_above_the_preset_when_it_is_above_each_of_its_seeds() -> None:
    tuning = BlindTuning("Ada")
    true_rewards = [
        one["true_reward"] for one in stored_figures("blind_tuning")["runs"][tuning.reveal()]
    ]
    assert tuning.is_above_preset(row())
    assert not tuning.is_above_preset(row(true_reward=(min(true_rewards) + max(true_rewards)) / 2))


@pytest.mark.parametrize("content", ["no json", "[1]", '{"rows": 3}'])
def test_a_file_that_is_no_leaderboard_is_put_aside(content: str) -> None:
    leaderboard_path().write_text(content)
    assert read_leaderboard() == []
    aside = leaderboard_path().with_name(leaderboard_path().name + ".unreadable")
    assert aside.read_text() == content
    assert add_to_leaderboard(row()) is None and read_leaderboard() == [row()]


def test_rows_that_cannot_be_understood_are_left_out() -> None:
    add_to_leaderboard(row())
    stored = json.loads(leaderboard_path().read_text())
    good = stored["rows"][0]
    stored["rows"] += [
        {},
        7,
        good | {"true_reward": "high"},
        good | {"name": 1},
        good | {"kl": None},
    ]
    leaderboard_path().write_text(json.dumps(stored))
    assert read_leaderboard() == [row()]


def test_a_place_that_cannot_be_written_costs_the_row_and_not_the_run(
    untrained, capsys, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_LAB_PROGRESS", str(tmp_path / "file" / "progress.json"))
    BlindTuning("Ada").run(**FIELDS)
    said = capsys.readouterr().out
    assert "the row is not saved" in said and "> Ada" in said


def test_the_board_lies_beside_the_progress_file(tmp_path: Path) -> None:
    assert leaderboard_path() == tmp_path / "progress.blind_tuning.json"


def test_the_frontier_spends_nothing_on_the_reference_and_rises() -> None:
    true_rewards, nats = true_reward_frontier()
    assert true_rewards[0].item() == pytest.approx(0.5, abs=1e-3) and nats[0].item() < 1e-6
    assert bool((true_rewards.diff() > 0).all()) and true_rewards[-1] > 0.999


def test_what_is_stored_of_the_preset_is_of_the_settings_as_they_stand() -> None:
    stored = stored_figures("blind_tuning")
    assert stored["settings"] == {**TUNING_SETTINGS, **PRESET_FIELDS}
    assert stored["budget"] == REVIEWS and stored["fresh_reviews"] == tuned_run.FRESH_REVIEWS
    assert set(stored["runs"]) == set(HIDDEN) and len(stored["seeds"]) >= 3
    columns = {name for name in TuningRow.__dataclass_fields__ if name not in (*FIELDS, "name")}
    for runs in stored["runs"].values():
        assert len(runs) == len(stored["seeds"]) and all(set(run) == columns for run in runs)


@pytest.mark.slow
def test_a_small_run_is_trained_and_scored_and_its_row_kept(monkeypatch) -> None:
    monkeypatch.setattr(tuned_run, "FRESH_REVIEWS", 32)
    fields = FIELDS | {"total_phases": 1, "batch_size": 8}
    found = BlindTuning("Ada").run(**fields)
    assert read_leaderboard() == [found]
    assert (
        0 <= found.true_reward_low <= found.true_reward <= found.true_reward_high <= 1
        and found.kl >= 0
    )
    assert leaderboard.plain_name(found.name) == "ada"
