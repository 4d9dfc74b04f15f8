"""A run's directory: how it comes to be, and that a crash leaves something that can be read."""

import errno
import json
from pathlib import Path

import pytest

from rlhf_lab.errors import RunError
from rlhf_lab.training import RunDir
from rlhf_lab.training.restore import load_policy
from rlhf_lab.training.rewind import rewind
from rlhf_lab.training.run_dir import replacing


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    run.write_info({"args": {"seed": 1}, "n": 1})
    return run


def test_create_makes_parents_and_the_folder_of_checkpoints(tmp_path):
    run = RunDir.create(tmp_path / "a" / "b")
    assert run.checkpoints.is_dir() and run.path == tmp_path / "a" / "b"


def test_an_empty_directory_is_taken(tmp_path):
    assert RunDir.create(tmp_path).path == tmp_path


def test_a_run_is_not_made_over_another(run):
    with pytest.raises(RunError, match="already holds a run; go on with `resume .*another --out"):
        RunDir.create(run.path)
    assert run.read_info() == {"args": {"seed": 1}, "n": 1}


def test_a_file_is_no_place_for_a_run(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file; choose another --out"):
        RunDir.create(tmp_path / "file")


def test_a_place_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="cannot write"):
        RunDir.create(tmp_path / "file" / "run")


def test_numbered_runs_count_on(tmp_path):
    paths = [RunDir.create_numbered("reel-seed1", tmp_path).path for _ in range(3)]
    assert [p.name for p in paths] == ["reel-seed1", "reel-seed1-2", "reel-seed1-3"]


def test_opening_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(RunError, match="there is no directory"):
        RunDir.open(tmp_path / "nowhere")


def test_opening_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="holds no run.json"):
        RunDir.open(tmp_path)


def test_info_comes_back_and_is_readable_by_people(run):
    run.write_info({"args": {"prefix": "schön"}, "best": None, "x": 0.1 + 0.2})
    assert RunDir.open(run.path).read_info() == {
        "args": {"prefix": "schön"},
        "best": None,
        "x": 0.1 + 0.2,
    }
    assert run.info_path.read_text().count("\n") > 3


@pytest.mark.parametrize("content", ["", "{", "not json", "\x00\x00"])
def test_an_unreadable_run_json_is_one_sentence(run, content):
    run.info_path.write_text(content)
    with pytest.raises(RunError, match="run.json is unreadable"):
        run.read_info()


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"args": 3}'])
def test_a_run_json_that_is_json_but_not_of_a_run_is_one_sentence(run, content):
    run.info_path.write_text(content)
    with pytest.raises(RunError, match="run.json"):
        load_policy(run.path)


def test_lines_are_added_and_come_back(run):
    run.append("samples.jsonl", [{"phase": 0, "text": "a\nb"}, {"phase": 0, "text": "ü"}])
    run.append("samples.jsonl", [{"phase": 1, "text": ""}])
    assert run.read("samples.jsonl") == [
        {"phase": 0, "text": "a\nb"},
        {"phase": 0, "text": "ü"},
        {"phase": 1, "text": ""},
    ]
    assert len((run.path / "samples.jsonl").read_bytes().split(b"\n")) == 4


def test_a_log_that_is_not_there_is_empty(run):
    assert run.read("metrics.jsonl") == []


@pytest.mark.parametrize("cut", [1, 5, 18])
def test_a_last_line_that_was_cut_off_is_left_out(run, cut):
    run.append("metrics.jsonl", [{"phase": 0, "x": 1.5}, {"phase": 1, "x": 2.5}])
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert run.read("metrics.jsonl") == [{"phase": 0, "x": 1.5}]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\r"])
def test_line_marks_of_other_alphabets_inside_a_text_do_not_break_the_log(run, mark):
    """A language model writes them now and then; str.splitlines would cut there."""
    records = [{"phase": 0, "text": f"a{mark}b"}, {"phase": 0, "text": "c"}]
    run.append("samples.jsonl", records)
    assert run.read("samples.jsonl") == records


def test_a_character_cut_in_two_by_a_crash_is_left_out(run):
    run.append("samples.jsonl", [{"phase": 0, "text": "a"}, {"phase": 1, "text": "ü"}])
    path = run.path / "samples.jsonl"
    raw = path.read_bytes()
    path.write_bytes(raw[: raw.index("ü".encode()) + 1])
    assert run.read("samples.jsonl") == [{"phase": 0, "text": "a"}]


def test_a_broken_line_in_the_middle_is_one_sentence(run):
    path = run.path / "metrics.jsonl"
    path.write_text('{"phase": 0}\n{"pha\n{"phase": 2}\n')
    with pytest.raises(RunError, match="metrics.jsonl"):
        run.read("metrics.jsonl")


def test_rewinding_drops_the_phases_that_are_done_again(run):
    """To phase 2: what phases 0 and 1 logged stays byte for byte, a half line goes too."""
    for phase in range(4):
        run.append("metrics.jsonl", [{"phase": phase, "x": 0.1 * phase, "none": None}])
        run.append("samples.jsonl", [{"phase": phase, "text": t} for t in ("schön", "gut")])
    metrics = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    samples = (run.path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"phase": 4, "x"')
    rewind(run, 2, 2)
    assert (run.path / "metrics.jsonl").read_bytes() == b"".join(metrics[:2])
    assert (run.path / "samples.jsonl").read_bytes() == b"".join(samples[:4])


def test_rewinding_to_the_start_empties_the_logs(run):
    run.append("metrics.jsonl", [{"phase": 0}])
    rewind(run, 0, 1)
    assert run.read("metrics.jsonl") == [] == run.read("samples.jsonl")


def test_replacing_shows_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("ne")
        assert path.read_text() == "old"
        partial.write_text("new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), TypeError()])
def test_replacing_leaves_the_old_file_when_the_write_fails(tmp_path, failure):
    path = tmp_path / "file"
    path.write_text("old")
    expected = RunError if isinstance(failure, OSError) else TypeError
    with pytest.raises(expected), replacing(path) as partial:
        partial.write_text("ne")
        raise failure
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failing_info_write_keeps_the_old_info(run):
    with pytest.raises(TypeError):
        run.write_info({"x": object()})
    assert json.loads(run.info_path.read_text()) == {"args": {"seed": 1}, "n": 1}
    assert {p.name for p in run.path.iterdir()} == {"run.json", "checkpoints"}
