"""A run's directory: creation, run.json and logs, and files after a crash."""

import errno
import json
from pathlib import Path

import pytest

from rlhf_lab.errors import RunError
from rlhf_lab.training import RunDir
from rlhf_lab.training.run_dir import FORMAT, METRIC, SAMPLE, replacing

INFO = {"format": FORMAT, "args": {"seed": 1}, "n": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "a" / "run")
    run.write_info({"args": {"seed": 1}, "n": 1})
    return run


def test_create_makes_parents_and_accepts_an_empty_directory(tmp_path):
    run = RunDir.create(tmp_path / "a" / "b")
    assert run.checkpoints.is_dir() and run.path == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert RunDir.create(tmp_path / "empty").path == tmp_path / "empty"


def test_create_rejects_occupied_places(run, tmp_path):
    with pytest.raises(RunError, match="already holds a run. Continue with `resume .*another --o"):
        RunDir.create(run.path)
    assert run.read_info() == INFO
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file. Choose another --out"):
        RunDir.create(tmp_path / "file")
    with pytest.raises(RunError, match="cannot write"):
        RunDir.create(tmp_path / "file" / "run")


@pytest.mark.parametrize("file", ["samples.jsonl", "checkpoints/best.safetensors"])
def test_create_never_replaces_foreign_files(tmp_path, file):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / file).symlink_to("nowhere")
    with pytest.raises(RunError, match=f"{file} exists, but there is no run"):
        RunDir.create(tmp_path)


def test_numbered_directories_count_up(tmp_path):
    paths = [RunDir.create_numbered("reel-seed1", tmp_path).path for _ in range(3)]
    assert [p.name for p in paths] == ["reel-seed1", "reel-seed1-2", "reel-seed1-3"]


def test_open_rejects_what_is_not_a_run(tmp_path):
    with pytest.raises(RunError, match="there is no directory"):
        RunDir.open(tmp_path / "nowhere")
    with pytest.raises(RunError, match="has no run.json"):
        RunDir.open(tmp_path)


def test_info_is_returned_and_readable(run):
    info = {"format": FORMAT, "args": {"prefix": "schön"}, "best": None, "x": 0.1 + 0.2}
    run.write_info(info)
    assert RunDir.open(run.path).read_info() == info
    assert run.info_path.read_text().count("\n") > 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, "is unreadable") for content in ("", "{", "not json", "\0\0", "[" * 100_000)),
        *((content, "expected an object") for content in ("[]", "3")),
        ("{}", "was written by another version of rlhf_lab"),
        ('{"args": {"seed": 1}}', "was written by another version of rlhf_lab"),
        ('{"args": {"seed": 1}, "format": 99}', "was written by another version of rlhf_lab"),
    ],
)
def test_read_info_rejects_other_contents(run, content, words):
    run.info_path.write_text(content)
    with pytest.raises(RunError, match=f"run.json .*{words}"):
        run.read_info()


def test_append_adds_lines_and_read_returns_them(run):
    run.append("samples.jsonl", [{"phase": 0, "text": "a\nb"}, {"phase": 0, "text": "ü"}])
    run.append("samples.jsonl", [{"phase": 1, "text": ""}])
    assert [record["text"] for record in run.read("samples.jsonl")] == ["a\nb", "ü", ""]
    assert len((run.path / "samples.jsonl").read_bytes().split(b"\n")) == 4
    assert run.read("metrics.jsonl") == []


@pytest.mark.parametrize("cut", [1, 5, 18])
def test_read_ignores_a_truncated_last_line(run, cut):
    run.append("metrics.jsonl", [{"phase": 0, "x": "a"}, {"phase": 1, "x": "2üüüüüü"}])
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert run.read("metrics.jsonl") == [{"phase": 0, "x": "a"}]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\r"])
def test_line_separators_in_a_text_do_not_split_a_line(run, mark):
    """A language model generates them; str.splitlines would split there."""
    records = [{"phase": 0, "text": f"a{mark}b"}, {"phase": 0, "text": "c"}]
    run.append("samples.jsonl", records)
    assert run.read("samples.jsonl") == records


@pytest.mark.parametrize(
    ("line", "fields", "words"),
    [
        (b'{"pha', METRIC, "is not valid JSON"),
        (b"hello", METRIC, "is not valid JSON"),
        (b"", METRIC, "is not valid JSON"),
        (b"\0" * 4096, METRIC, "is not valid JSON"),
        (b'{"phase": 1, "text": "caf\xe9"}', SAMPLE, "is not valid JSON"),
        (b"9" * 10_000, METRIC, "is not valid JSON"),
        (b"[" * 100_000, METRIC, "is not valid JSON"),
        (b"[1]", METRIC, "has no field 'phase'"),
        (b"{}", METRIC, "has no field 'phase'"),
        (b'{"phase": "1"}', METRIC, "has phase='1'"),
        (b'{"phase": 1.5}', METRIC, "has phase=1.5"),
        (b'{"phase": true}', METRIC, "has phase=True"),
        (b'{"phase": 1, "mean_reward": "x"}', METRIC, "has mean_reward='x'"),
        (b'{"phase": 1, "text": 3, "reward": 1}', SAMPLE, "has text=3"),
        (b'{"phase": 1, "text": "", "reward": "x"}', SAMPLE, "has reward='x'"),
    ],
)
def test_read_rejects_a_broken_line_by_number(run, line, fields, words):
    first = b'{"phase": 0, "mean_reward": null, "text": "", "reward": 0}'
    (run.path / "log.jsonl").write_bytes(first + b"\n" + line + b"\n" + first + b"\n")
    with pytest.raises(RunError, match=f"log.jsonl, line 2, {words}"):
        run.read("log.jsonl", fields)


def test_rewind_drops_the_phases_that_are_done_again(run):
    for phase in range(4):
        run.append("metrics.jsonl", [{"phase": phase, "x": 0.1 * phase, "none": None}])
        run.append("samples.jsonl", [{"phase": phase, "text": t} for t in ("schön", "gut")])
        run.append(
            "returned/f.jsonl", [{"phase": phase, "checkpoint": c} for c in ("last", "best")]
        )
    lines = {
        f: (run.path / f).read_bytes().splitlines(True) for f in ("metrics.jsonl", "samples.jsonl")
    }
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"phase": 4, "x"')
    (run.checkpoints / ".last.safetensors.partial").touch()
    run.rewind(2)
    assert (run.path / "metrics.jsonl").read_bytes() == b"".join(lines["metrics.jsonl"][:2])
    assert (run.path / "samples.jsonl").read_bytes() == b"".join(lines["samples.jsonl"][:4])
    # `last` of phase 2 was saved before phase 2, `best` within it
    returned = [(r["phase"], r["checkpoint"]) for r in run.read("returned/f.jsonl")]
    assert returned == [(0, "last"), (0, "best"), (1, "last"), (1, "best"), (2, "last")]
    assert not list(run.checkpoints.iterdir())
    run.rewind(0)
    assert run.read("metrics.jsonl") == run.read("returned/f.jsonl") == []


def test_replacing_shows_the_old_file_until_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), TypeError()])
def test_replacing_keeps_the_old_file_when_the_write_fails(tmp_path, failure):
    path = tmp_path / "file"
    path.write_text("old")
    expected = RunError if isinstance(failure, OSError) else TypeError
    with pytest.raises(expected), replacing(path) as partial:
        partial.write_text("ne")
        raise failure
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_failed_write_of_run_json_keeps_the_old_one(run):
    with pytest.raises(TypeError):
        run.write_info({"x": object()})
    assert json.loads(run.info_path.read_text()) == INFO
    assert {p.name for p in run.path.iterdir()} == {"run.json", "checkpoints"}
