"""The ladder: what holds a rung, and what the stored climbs of wrong trainers show."""

import json
from importlib.resources import files

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.ladder import (
    LADDER_FIELDS,
    RUNGS,
    WRONG_CLIMBERS,
    climb,
    falls_from,
    first_word,
    last_word,
    stored_climbs,
    stored_others,
    stored_texts,
)
from tools.course.broken_runs import BROKEN_SETTINGS
from tools.course.hunt_runs import HEALTHY_OTHERS


@pytest.mark.parametrize(
    ("value", "last", "first", "falls"),
    [(0.95, 0.8, 0.8, 4), (0.89, 0.8, 0.8, 1), (1.05, 0.75, 0.8, 2), (1.0, 0.76, 0.5, 3)],
)
def test_the_first_rung_that_is_not_held(value, last, first, falls):
    assert falls_from(dict(zip(RUNGS, (value, last, first), strict=True))) == falls


def test_the_rewards_of_words_are_those_of_their_first_letters():
    """The prompt is "this movie": the third word is the first one that is written."""
    texts = ["this movie was nice", "this movie Zoo map", "this movie"]
    assert first_word(texts).tolist() == [0, 0, 0]
    assert first_word(["this movie map zoo"]).tolist() == [1]
    assert last_word([*texts, ""]).tolist() == [0, 1, 1, 0]


def test_each_wrong_trainer_falls_from_a_rung_of_its_own_with_every_seed():
    falls = {name: [falls_from(one) for one in runs] for name, runs in stored_climbs().items()}
    assert falls.keys() == {"healthy", *WRONG_CLIMBERS}
    assert list(falls.values()) == [[4] * 3, [1] * 3, [2] * 3, [3] * 3]
    credit, healthy = (stored_climbs()[name] for name in ("credit for the last", "healthy"))
    assert all(a["2: last word"] > b["2: last word"] for a, b in zip(credit, healthy, strict=True))


def test_the_record_is_of_the_lessons_settings():
    path = files("rlhf_lab.course") / "records/bug_hunt.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["settings"] == BROKEN_SETTINGS and record["ladder"] == dict(LADDER_FIELDS)
    assert (
        HEALTHY_OTHERS["half the learning rate"]["base_lr"] * 2 == RLHFArgs(preset="reel").base_lr
    )
    assert stored_others().keys() == HEALTHY_OTHERS.keys()
    assert all(len(runs) == len(record["seeds"]) == 3 for runs in stored_others().values())
    assert [len(rows) for rows in stored_texts().values()] == [3, 3, 3]


@pytest.mark.slow
def test_a_wrong_climber_climbs(monkeypatch):
    """Two phases are too few to hold a rung."""
    monkeypatch.setattr("rlhf_lab.course.ladder.LADDER_FIELDS", LADDER_FIELDS | {"total_phases": 2})
    settings = BROKEN_SETTINGS | {"seed": 1, "warmup_steps": 1}
    for parts in WRONG_CLIMBERS.values():
        assert 0 <= climb(settings, "2: last word", parts) < 0.75
