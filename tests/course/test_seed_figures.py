"""Figures over seeds: what is shown next to a run, what is stored, and that it is not stale."""

import ast
import json
from pathlib import Path

import nbformat
import pytest

from rlhf_lab.course import SeedFigures, seed_figures
from tests.course.test_lesson_again import without_magic
from tools.course import record
from tools.course.builder import masters
from tools.course.runs import RECORDS_OF_RUNS
from tools.course.size import lesson_name

ROOT = Path(__file__).parents[2]
NUMBERS = {"first": [0.2, 0.5, 0.5], "second": [0.3, 0.1, 0.2]}
RECORD = {"settings": {"total_phases": 12}, "seeds": [1, 2, 3], "tables": {"true_reward": NUMBERS}}
LESSONS = {lesson_name(master): master for master in masters(ROOT)}
STORED = sorted((ROOT / record.RECORDS).glob("*.json"))
RECORDS = [path for path in STORED if path.stem in LESSONS]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_figures, "stored_figures", lambda lesson: RECORD)


@pytest.mark.parametrize(
    ("settings", "numbers", "words"),
    [
        ({"total_phases": 12, "seed": 9}, (0.25, 0.5), "first 0.250 (others 0.200 to 0.500); "),
        ({"total_phases": 12, "seed": 1}, (0.2, 0.3), "first 0.200 (others 0.500 to 0.500)"),
        ({"total_phases": 2, "seed": 1}, (0.2, 0.3), "no other seeds are stored"),
        ({"total_phases": 12, "seed": 2}, (0.5, 0.12), "2 differs from this one by up to 0.02"),
        ({"total_phases": 12, "seed": 2}, (0.5, 0.101), "first 0.500 (others 0.200 to 0.500)"),
    ],
)
def test_compare_shows_this_run_and_other_seeds(stored, capsys, settings, numbers, words) -> None:
    over_seeds, figures = SeedFigures("any", settings), dict(zip(NUMBERS, numbers, strict=True))
    over_seeds.compare("true_reward", figures)
    out = capsys.readouterr().out
    assert out.startswith("true_reward: first ") and words in out
    assert ("differs" in out) == ("differs" in words)
    assert over_seeds.tables["true_reward"] == figures
    over_seeds.compare("true_reward", {"first": 0.2, "third": 0.3})
    assert "no other seeds are stored" in capsys.readouterr().out


def test_a_lesson_without_a_record_has_this_run_alone(capsys) -> None:
    SeedFigures("no_such_lesson", {"seed": 1}).compare("true_reward", {"first": 0.25})
    assert capsys.readouterr().out.startswith("true_reward: first 0.250\n")


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_what_is_stored_is_of_the_lesson_as_it_stands(path: Path) -> None:
    """Its settings, at least three seeds, and the very figures of the executed solution."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    master = LESSONS[path.stem]
    found = [
        node.value
        for node in ast.walk(ast.parse(without_magic(master.read_text(encoding="utf-8"))))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
    ]
    settings = {word.arg: ast.literal_eval(word.value) for word in found[0].keywords}
    assert settings.pop("seed") == 1 and settings == stored["settings"]
    assert len(stored["seeds"]) >= 3
    notebook = nbformat.read(master.with_suffix(".ipynb"), as_version=4)
    output = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "(others " in output
    assert "differs from this one" not in output and "no other seeds are stored" not in output


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_record_names_a_program_that_writes_it(path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    command, name = stored["made_by"].split()[3:5]
    assert command == ("runs" if path.stem in RECORDS_OF_RUNS else "record")
    assert name in {"record": LESSONS, "runs": RECORDS_OF_RUNS}[command]
    if command == "runs":
        made = RECORDS_OF_RUNS[name]
        assert stored.keys() == {"made_by", *made.heading, *made.parts}
        heading = json.loads(json.dumps(dict(made.heading)))
        assert {entry: stored[entry] for entry in heading} == heading
