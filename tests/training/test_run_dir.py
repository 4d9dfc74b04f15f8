"""A run's directory: creation, run.json, logs and lock, and files after a crash."""

import errno
import math
from pathlib import Path

import pytest
from filelock import FileLock

from rlhf_lab.errors import RunError
from rlhf_lab.files import partial_file
from rlhf_lab.training import RunDir
from rlhf_lab.training.run_dir import FORMAT, LOCK, RunLock

INFO = {"format": FORMAT, "id": "1", "args": {"prefix": "schön"}, "best": None, "x": 0.1 + 0.2}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "a" / "run")
    run.write_info(INFO)
    return run


def test_create_accepts_empty_directories_only(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert RunDir.create(tmp_path / "empty").checkpoints.is_dir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link" / "checkpoints").mkdir(parents=True)
    (tmp_path / "link" / "checkpoints" / "best.safetensors").symlink_to("nowhere")
    for path in (run.path, *(tmp_path / name for name in ("file", "file/run", "link"))):
        with pytest.raises(RunError, match="hoose another"):
            RunDir.create(path)
    assert RunDir.open(run.path).read_info() == INFO
    for content in ("[" * 100_000, "[]"):
        run.info_path.write_text(content)
        with pytest.raises(RunError, match="run.json (is unreadable|contains)"):
            run.read_info()
    paths = [RunDir.create_numbered("reel-seed1", tmp_path).path for _ in range(3)]
    assert [p.name for p in paths] == ["reel-seed1", "reel-seed1-2", "reel-seed1-3"]


def test_relative_run_stays_when_the_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir.create("run")
    assert str(run.path) == "run"
    monkeypatch.chdir("/")
    run.append("samples.jsonl", [{"phase": 0}])
    assert run.path == tmp_path / "run" and (tmp_path / "run" / "samples.jsonl").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunDir(Path("~/run")).path == tmp_path / "run"


MARKS = "\u2028 \u2029 \x85 \x0b \x1c \r \n"  # str.splitlines splits there


def test_append_adds_lines_and_read_returns_them(run):
    records = [{"phase": 0, "text": f"a{MARKS}b"}, {"phase": 1, "text": "ü", "none": None}]
    for record in records:
        run.append("new/samples.jsonl", [record])
    assert run.read("new/samples.jsonl") == records
    assert len((run.path / "new/samples.jsonl").read_bytes().split(b"\n")) == 3
    assert run.read("metrics.jsonl") == []
    run.append("metrics.jsonl", [{"phase": 0, "x": [math.inf, (1.5, math.nan)], "y": -math.inf}])
    assert run.read("metrics.jsonl") == [{"phase": 0, "x": [None, [1.5, None]], "y": None}]


def test_read_ignores_a_truncated_last_line_and_rejects_others(run):
    records = [{"phase": 0, "x": "a"}, {"phase": 1, "x": "2üü"}]
    run.append("log.jsonl", records)
    path, line = run.path / "log.jsonl", b'{"phase": 0}\n'
    whole = path.read_bytes()
    for cut, n in ((1, 2), (2, 1), (5, 1)):
        path.write_bytes(whole[:-cut])
        assert run.read("log.jsonl") == records[:n]
    for broken in (b'{"pha', b'{"phase": 1, "text": "caf\xe9"}', b"[" * 100_000, b"[1]", b"{}"):
        path.write_bytes(line + broken + b"\n" + line)
        with pytest.raises(RunError, match="log.jsonl, line 2, is not a JSON object with a phase"):
            run.read("log.jsonl")


def test_rewind_drops_the_phases_that_are_done_again(run):
    """`last` of phase 2 was saved before phase 2, and `best` within it."""
    for phase in range(4):
        run.append("metrics.jsonl", [{"phase": phase, "x": 0.1 * phase}])
        run.append("samples.jsonl", [{"phase": phase, "text": t} for t in ("schön", "gut")])
        run.append(
            "returned/f.jsonl", [{"phase": phase, "checkpoint": c} for c in ("last", "best")]
        )
    files = [run.path / "metrics.jsonl", run.path / "samples.jsonl"]
    metrics, samples = (file.read_bytes().splitlines(True) for file in files)
    files[0].write_bytes(files[0].read_bytes() + b'{"phase": 4, "x"')
    (run.checkpoints / ".last.safetensors.partial").touch()
    run.rewind(2)
    contents = [file.read_bytes() for file in files]
    assert contents == [b"".join(metrics[:2]), b"".join(samples[:4])]
    returned = [(r["phase"], r["checkpoint"]) for r in run.read("returned/f.jsonl")]
    assert returned == [(0, "last"), (0, "best"), (1, "last"), (1, "best"), (2, "last")]
    assert not list(run.checkpoints.iterdir())
    run.rewind(0)
    assert run.read("metrics.jsonl") == run.read("returned/f.jsonl") == []


def test_partial_file_shows_the_old_file_until_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    full = OSError(errno.ENOSPC, "No space left")
    for failure, raised in ((full, RunError), (TypeError(), TypeError)):
        with pytest.raises(raised), partial_file(path) as partial:
            partial.write_text("new")
            raise failure
        assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]
    with partial_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_newest_lock_of_a_process_takes_over(tmp_path):
    older, newer = RunLock(), RunLock()
    of_path = FileLock(tmp_path / LOCK, timeout=0, thread_local=False, is_singleton=True)
    assert [lock.hold(tmp_path) for lock in (older, older, newer)] == [True, False, True]
    with pytest.raises(RunError, match="Another trainer has taken over the run"):
        older.hold(tmp_path)
    older.release()
    assert not newer.hold(tmp_path) and (tmp_path / LOCK).exists()
    newer.release()
    assert not of_path.is_locked  # the file is closed
    assert not (tmp_path / LOCK).exists() and newer.hold(tmp_path)
    newer.release()
