"""Blind tuning: runs are scored and ranked, and the leaderboard is kept."""

import json
from collections import Counter

import pytest

from rlhf_lab.course import blind_tuning
from rlhf_lab.course.blind_tuning import (
    HIDDEN,
    BlindTuning,
    TuningRow,
    add_to_leaderboard,
    hidden_reward,
    leaderboard_path,
    read_leaderboard,
)
from rlhf_lab.course.display import LessonError
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.errors import RunError

FIELDS = {"kl_coef": 0.1, "base_lr": 1e-3, "total_phases": 12, "batch_size": 128}
METRICS = {"reward": 0.8, "true_reward": 0.95, "true_reward_low": 0.93, "true_reward_high": 0.97}
METRICS |= {"kl": 1.5, "excess_kl": 0.9}


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs with fixed metrics and no training; the rewards that were requested."""
    rewards = []
    figures = lambda reward_fn, fields: rewards.append(reward_fn) or METRICS
    monkeypatch.setattr(blind_tuning, "tuned_figures", figures)
    return rewards


def row(name: str = "Ada", **changed) -> TuningRow:
    return TuningRow(**{"name": name, **FIELDS, **METRICS, **changed})


def test_hidden_reward_is_uniform_and_ignores_spelling() -> None:
    assert hidden_reward("Ada  Lovelace") == hidden_reward(" ada lovelace ")
    counts = Counter(hidden_reward(f"learner {i}") for i in range(500))
    assert set(counts) == set(HIDDEN) and min(counts.values()) > 60  # 100 of each expected
    with pytest.raises(LessonError, match="name is empty"):
        BlindTuning("  ")


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kl_coef": -0.1}, "kl_coef=-0.1"),
        ({"batch_size": 126}, "batch_size=126"),
        ({"total_phases": 13}, "must be at most 1536, got 1664"),
    ],
)
def test_run_raises_on_invalid_fields_in_one_line(changed, message) -> None:
    with pytest.raises(LessonError, match=message) as error:
        BlindTuning("Ada").run(**FIELDS | changed)
    assert error.value._render_traceback_() == [str(error.value)]
    assert not leaderboard_path().exists()


def test_run_raises_when_training_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(reward_fn, fields):
        raise RunError("kl_per_sequence is nan in phase 3.")

    monkeypatch.setattr(blind_tuning, "tuned_figures", diverge)
    with pytest.raises(LessonError, match="is nan in phase 3"):
        BlindTuning("Ada").run(**FIELDS)
    assert not read_leaderboard()


@pytest.mark.slow
def test_run_replaces_the_row_with_the_same_fields(untrained: list[str], capsys) -> None:
    tuning = BlindTuning("Ada")
    tuning.run(**FIELDS)
    BlindTuning(" ADA ").run(**FIELDS)
    assert [each.name for each in read_leaderboard()] == ["ADA"]
    tuning.run(**FIELDS | {"kl_coef": 0.2})
    assert len(read_leaderboard()) == 2 and untrained == [hidden_reward("ada")] * 3
    out = capsys.readouterr().out
    assert "exact optimum" in out and "preset, seed 3" in out and "n = 512 reviews" in out
    assert hidden_reward("ada") == tuning.reveal()


def test_leaderboard_hides_the_reward_and_other_rewards(untrained, capsys) -> None:
    mine, names = hidden_reward("Ada"), [f"learner {i}" for i in range(20)]
    other = next(name for name in names if hidden_reward(name) != mine)
    same = next(name for name in names if hidden_reward(name) == mine)
    add_to_leaderboard(row(other))
    add_to_leaderboard(row(same))
    BlindTuning("Ada").run(**FIELDS | {"kl_coef": 0.0})
    out = capsys.readouterr().out
    assert same in out and other not in out and mine not in out
    assert "exact optimum" not in out  # undefined without a KL penalty


def test_rank_orders_by_excess_kl_above_the_true_reward() -> None:
    rows = [
        row("b", true_reward=0.95, excess_kl=0.4),
        row("a", true_reward=0.9, excess_kl=0.1),
        row("c", true_reward=0.9995, excess_kl=None),
        row("d", true_reward=0.89, excess_kl=0.01),
        row("e", true_reward=0.3, excess_kl=None),
    ]
    ranked = sorted(reversed(rows), key=lambda each: each.rank)
    assert "".join(each.name for each in ranked) == "abcde"


def test_is_above_preset_compares_with_every_seed() -> None:
    tuning = BlindTuning("Ada")
    runs = stored_figures("blind_tuning")["runs"][tuning.reveal()]
    true_rewards = [run["true_reward"] for run in runs]
    assert tuning.is_above_preset(row())
    assert not tuning.is_above_preset(row(true_reward=(min(true_rewards) + max(true_rewards)) / 2))


def test_read_leaderboard_leaves_out_invalid_rows_and_files() -> None:
    add_to_leaderboard(row())
    stored = json.loads(leaderboard_path().read_text())
    stored["rows"] += [{}, 7, stored["rows"][0] | {"unknown": 1}]
    leaderboard_path().write_text(json.dumps(stored))
    assert read_leaderboard() == [row()]
    leaderboard_path().write_text('{"rows": 3}')
    assert read_leaderboard() == []
    assert leaderboard_path().with_name(leaderboard_path().name + ".unreadable").is_file()


@pytest.mark.slow
def test_run_trains_and_keeps_its_row(monkeypatch) -> None:
    monkeypatch.setattr(blind_tuning, "FRESH_REVIEWS", 32)
    result = BlindTuning("Ada").run(**FIELDS | {"total_phases": 1, "batch_size": 8})
    assert read_leaderboard() == [result] and result.kl >= 0
    assert 0 <= result.true_reward_low <= result.true_reward <= result.true_reward_high <= 1
