"""A run's directory whose files were edited, spoilt, lost, swapped or replaced.

Each case is a command, an edit, and how it must end: `refused` (one sentence, nothing touched),
`equal` (as a run that was not spoilt), `warned` (the same weights, and a warning) or `written`.
"""
# ruff: noqa: E501 -- a case is a line

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.doors.door import accepted, contents, refused, untouched
from tests.doors.test_checkpoint_notes import rewrite

Edit = Callable[[Path], Any]
LAST = "checkpoints/last.safetensors"
BEST = "checkpoints/best.safetensors"
ONE = "checkpoints/phase_000001.safetensors"


@pytest.fixture(scope="module")
def whole(half_done: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run after it went on to its end, unspoilt."""
    path = tmp_path_factory.mktemp("whole") / "RUN"
    shutil.copytree(half_done, path)
    accepted(["resume", path])
    return path


def info(change: Callable[[dict[str, Any]], Any]) -> Edit:
    def edit(run: Path) -> None:
        found = json.loads((run / "run.json").read_text())
        change(found)
        (run / "run.json").write_text(json.dumps(found))

    return edit


def field(name: str, value: Any) -> Edit:
    return info(
        lambda found: found.pop(name, None) if value is ... else found.update({name: value})
    )


def setting(name: str, value: Any) -> Edit:
    def change(found: dict[str, Any]) -> None:
        if value is ...:
            del found["args"][name]
        else:
            found["args"][name] = value

    return info(change)


def raw(file: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda run: (run / file).write_bytes(change((run / file).read_bytes()))


def lines(file: str, change: Callable[[list[bytes]], list[bytes]]) -> Edit:
    return raw(file, lambda found: b"".join(change(found.splitlines(keepends=True))))


def record(file: str, change: Callable[[dict[str, Any]], Any], number: int = 1) -> Edit:
    def edit(found: list[bytes]) -> list[bytes]:
        entry = json.loads(found[number])
        change(entry)
        return [*found[:number], json.dumps(entry).encode() + b"\n", *found[number + 1 :]]

    return lines(file, edit)


def instead(file: str, kind: str) -> Edit:
    """Something else than a regular file in a file's place."""

    def edit(run: Path) -> None:
        path = run / file
        if path.is_file():
            path.rename(run.parent / "taken")
        elif path.is_dir():
            shutil.rmtree(path)
        path.parent.mkdir(exist_ok=True)
        if kind == "directory":
            path.mkdir()
            (path / "thesis.tex").write_text("all I have")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "dangling link":
            path.symlink_to(run.parent / "gone")
        elif kind == "device":
            path.symlink_to("/dev/null")
        elif kind == "link":
            (run.parent / "taken").touch()
            path.symlink_to(run.parent / "taken")
        elif kind == "file":
            path.write_text("all I have")

    return edit


def tensors(change: Callable[[dict[str, Any]], Any], file: str = LAST) -> Edit:
    def changed(found: dict[str, Any], notes: Any) -> Any:
        change(found)
        return found, notes

    return lambda run: rewrite(run / file, changed)


def notes(change: dict[str, Any], file: str = LAST) -> Edit:
    return lambda run: rewrite(run / file, lambda found, old: (found, old | change))


def cast(kind: torch.dtype) -> Edit:
    return tensors(
        lambda found: found.update(
            {k: v.to(kind) for k, v in found.items() if k[:9] != "optimizer"}
        )
    )


def lose(ending: str) -> Edit:
    return tensors(lambda found: [found.pop(name) for name in list(found) if name.endswith(ending)])


def copy(source: str, target: str) -> Edit:
    return lambda run: shutil.copy(run / source, run / target)


def flip(at: float) -> Callable[[bytes], bytes]:
    def change(found: bytes) -> bytes:
        place = int(at * (len(found) - 1))
        return found[:place] + bytes([found[place] ^ 8]) + found[place + 1 :]

    return change


def lock(text: str, age: float = 0) -> Edit:
    def edit(run: Path) -> None:
        (run / "run.lock").write_text(text)
        os.utime(run / "run.lock", (time.time() - age,) * 2)

    return edit


def pickled(run: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, run / LAST)


def another(run: Path) -> None:
    found = json.loads((run / "run.json").read_text())
    notes({"run": found["id"][::-1]})(run)


def bomb(size: int) -> Callable[[bytes], bytes]:
    return lambda found: size.to_bytes(8, "little") + found[8:]


def dead(boot: str) -> str:
    return json.dumps({"host": socket.gethostname(), "pid": 1, "boot": boot})


BOOT = Path("/proc/sys/kernel/random/boot_id")
HERE = BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()

SETTINGS: dict[str, tuple[Any, ...]] = {
    "total_phases": ("3", 0, -1, 2.5, True, None, float("inf"), 9),
    "gen_len": (0, "8", 9, [8]),
    "batch_size": (None, 32, 0, 15),
    "seed": (2, 2**70, -1, "1"),
    "kl_coef": (-1, float("nan"), 50, "0.3"),
    "base_lr": ("fast", 1e-9, -1e-3),
    "head_lr": (0.1, {}),
    "save_every": (2, 0),
    "temperature": (0, 2.0),
    "top_k": (0, 5),
    "reward_fn": ("none such", "length"),
    "policy_loss": ("none such", "reinforce"),
    "optimizer": ("none such",),
    "device": ("tpu",),
    "prefix": ([], "the film"),
    "normalize_reward": ("yes", False),
    "preset": ("none such",),
    "learning": (1,),
    "num_minibatches": (4,),
    "gamma": (0.5,),
}
FIELDS: dict[str, tuple[Any, ...]] = {
    "args": (..., None, [], "x", {}),
    "id": (..., 3, None, []),
    "saved": ("x", [], -1),
    "changes": (
        "x",
        3,
        {"a": 1},
        [1],
        [{}],
        [{"phase": "1", "field": "kl_coef", "from": 1, "to": 2}],
    ),
    "remarks": ([1], "x", 3, {"a": 1}, {"a": {}}, {"a": {"phase": "x", "text": "y"}}),
    "own_parts": ("x", 3, [1]),
    "interventions": ("x", 3, [1], [{}]),
    "rewarded_class": ("x", 3, {"index": 0}),
    "sources": ("x", [1], 3),
}
LINES = {
    "text": lambda found: [*found[:1], b"hello\n", *found[1:]],
    "a list": lambda found: [*found[:1], b"[1]\n", *found[1:]],
    "an empty line": lambda found: [*found[:1], b"\n", *found[1:]],
    "NUL bytes": lambda found: [*found[:1], b"\0" * 4096 + b"\n", *found[1:]],
    "half a line within": lambda found: [found[0][:30] + b"\n", *found[1:]],
    "another encoding": lambda found: [line.decode().encode("utf-16") for line in found],
    "a byte of latin-1": lambda found: [
        *found[:1],
        b'{"phase": 1, "text": "caf\xe9"}\n',
        *found[1:],
    ],
    "digits without end": lambda found: [*found[:1], b"9" * 10_000 + b"\n", *found[1:]],
}
PHASES = {"missing": ..., "of text": "1", "1.5": 1.5, "null": None, "a flag": True, "below 0": -1}


def _phase(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda entry: entry.pop("phase") if value is ... else entry.update(phase=value)


CASES: list[tuple[str, str, str, Edit, tuple[str, ...]]] = []


def case(name: str, command: str, ending: str, edit: Edit, *words: str) -> None:
    CASES.append((name, command, ending, edit, words))


for name, values in SETTINGS.items():
    for value in values:
        case(f"setting {name}={value!r:.12}", "resume", "refused", setting(name, value), name)
for name, values in FIELDS.items():
    for value in values:
        shown = "missing" if value is ... else f"{value!r:.30}"
        case(f"run.json {name} {shown}", "resume", "refused", field(name, value), "RUN")
for value in ([1], "x", {"a": 1}, {"a": {}}):
    case(f"run.json remarks {value!r}", "report", "refused", field("remarks", value), "run.json")
for value in ("x", [1], [{}]):
    case(f"run.json changes {value!r}", "report", "refused", field("changes", value), "run.json")
for name, value in {
    "extra": 1,
    "status": ...,
    "phases_done": ...,
    "versions": {},
    "remarks": ...,
}.items():
    case(f"run.json {name} {value!r:.9}", "resume", "equal", field(name, value))
case("run.json saved 99", "resume", "equal", field("saved", 99))
case(
    "setting base_model='no-such'",
    "resume",
    "refused",
    setting("base_model", "no-such"),
    "'no-such'",
)
case("setting seed missing", "resume", "equal", setting("seed", ...))
for name, change in {
    "empty": lambda found: b"", "null": lambda found: b"null", "cut off": lambda found: found[:-90],
    "utf-16": lambda found: found.decode().encode("utf-16"), "BOM": lambda found: b"\xef\xbb\xbf" + found,
    "NUL bytes": lambda found: b"\0" * len(found), "twice": lambda found: found * 2,
}.items():  # fmt: skip
    for command in ("resume", "report", "sample"):
        case(f"run.json {name}", command, "refused", raw("run.json", change), "run.json")
case("run.json CRLF", "resume", "equal", raw("run.json", lambda b: b.replace(b"\n", b"\r\n")))
case("run.json 5 MB of spaces", "resume", "equal", raw("run.json", lambda b: b + b" " * 5_000_000))
for kind in ("directory", "pipe", "dangling link", "device", "nothing"):
    case(f"run.json {kind}", "resume", "refused", instead("run.json", kind), "RUN")
case("run.json a link", "resume", "refused", instead("run.json", "link"), "run.json")

for file in ("metrics.jsonl", "samples.jsonl"):
    for name, change in LINES.items():
        case(f"{file} {name}", "resume", "refused", lines(file, change), file)
    for name, value in PHASES.items():
        case(f"{file} phase {name}", "resume", "refused", record(file, _phase(value)), file)
    for kind in ("directory", "pipe", "link", "device", "dangling link"):
        case(f"{file} {kind}", "resume", "refused", instead(file, kind), file)
    case(f"{file} CRLF", "resume", "equal", raw(file, lambda b: b.replace(b"\n", b"\r\n")))
    case(f"{file} of later phases", "resume", "equal", lines(file, lambda found: [
        *found, json.dumps(json.loads(found[-1]) | {"phase": 7}).encode() + b"\n"]))  # fmt: skip
    case(
        f"{file} half a line more", "resume", "equal", raw(file, lambda b: b + b'{"phase": 2, "te')
    )
    case(
        f"{file} with a mark of order", "resume", "equal", raw(file, lambda b: b"\xef\xbb\xbf" + b)
    )
    case(f"{file} doubled", "resume", "mended", lines(file, lambda found: found * 2), file)
    case(f"{file} backwards", "resume", "mended", lines(file, lambda found: found[::-1]), file)
    case(f"{file} empty", "resume", "warned", raw(file, lambda b: b""), file)
    case(f"{file} gone", "resume", "warned", lambda run, file=file: (run / file).unlink(), file)
    case(f"{file} without phase 0", "resume", "warned", lines(file, lambda found: [
        line for line in found if json.loads(line)["phase"]]), file)  # fmt: skip
    for name, value in {"of text": "1", "missing": ...}.items():
        case(f"{file} phase {name}", "report", "refused", record(file, _phase(value)), file)
    for name in ("text", "NUL bytes", "another encoding"):
        case(f"{file} {name}", "report", "refused", lines(file, LINES[name]), file)
case(
    "metrics.jsonl line twice",
    "resume",
    "mended",
    lines("metrics.jsonl", lambda f: [f[0], *f]),
    "twice",
)
case(
    "samples.jsonl line twice",
    "resume",
    "mended",
    lines("samples.jsonl", lambda f: [*f[:16], *f]),
    "twice",
)
case(
    "mean_reward of text",
    "report",
    "refused",
    record("metrics.jsonl", lambda r: r.update(mean_reward="x")),
    "mean_reward",
)
case(
    "text a number",
    "report",
    "refused",
    record("samples.jsonl", lambda r: r.update(text=3)),
    "text",
)
case(
    "reward of text",
    "report",
    "refused",
    record("samples.jsonl", lambda r: r.update(reward="x")),
    "reward",
)

for at in (0, 7, 8, 500, 40_000, 519_000):
    for command in ("resume", "sample", "export"):
        case(
            f"last cut at {at}",
            command,
            "refused",
            raw(LAST, lambda b, at=at: b[:at]),
            "last.safetensors",
        )
for at in (0.0, 0.001, 0.3, 0.6, 0.9, 1.0):
    case(
        f"last with a bit flipped at {at}",
        "resume",
        "refused",
        raw(LAST, flip(at)),
        "last.safetensors",
    )
for size in (2**63, 2**40, 99_000_000):
    case(
        f"last with a header of {size}",
        "resume",
        "refused",
        raw(LAST, bomb(size)),
        "last.safetensors",
    )
for kind in ("directory", "pipe", "dangling link", "device", "nothing", "file"):
    for command in ("resume", "sample"):
        case(f"last {kind}", command, "refused", instead(LAST, kind), "last.safetensors")
case("checkpoints a file", "resume", "refused", instead("checkpoints", "file"), "checkpoints")
case(
    "checkpoints gone",
    "resume",
    "refused",
    lambda run: shutil.rmtree(run / "checkpoints"),
    "last.safetensors",
)
for command in ("resume", "sample", "export"):
    case("last of another run", command, "refused", another, "another run")
    case("last a pickle", command, "refused", pickled, "last.safetensors")
    case("last is phase 1", command, "refused", copy(ONE, LAST), "copy of this run's")
    case("last is best", command, "refused", copy(BEST, LAST), "copy of this run's")
    for kind in (torch.float16, torch.int32, torch.float64):
        case(f"last of {kind}", command, "refused", cast(kind), "last.safetensors")
for ending in (".exp_avg", ".exp_avg_sq", ".step"):
    case(f"last without {ending}", "resume", "refused", lose(ending), "tensors")
    case(f"last without {ending}, and the count fits", "resume", "refused", lambda run, e=ending: (
        lose(e)(run), rewrite(run / LAST, lambda t, n: (t, n | {"tensors": len(t)}))), "moments")  # fmt: skip
for name in ("optimizer.x", "optimizer.", "optimizer.x.exp_avg", "optimizer.-1.exp_avg", "optimizer.999.exp_avg",
             "optimizer.0.unknown", "optimizer.1e3.step", "optimizer.\u00b2.step"):  # fmt: skip
    case(f"last with {name}", "resume", "refused", lambda run, name=name: (
        tensors(lambda t: t.update({name: torch.zeros(1)}))(run),
        rewrite(run / LAST, lambda t, n: (t, n | {"tensors": len(t)}))), "last.safetensors")  # fmt: skip
case(
    "last with a weight too many",
    "resume",
    "refused",
    tensors(lambda t: t.update(w=torch.zeros(1))),
    "tensors",
)
case("last of phase 99", "resume", "refused", notes({"phase": 99}), "phase")
for value in (float("nan"), float("inf")):
    case(f"last with weights of {value}", "resume", "refused", tensors(lambda t, v=value: [
        t[k].fill_(v) for k in t if k[:9] != "optimizer"]), "nan or inf")  # fmt: skip
    case(f"last with weights of {value}", "sample", "refused", tensors(lambda t, v=value: [
        t[k].fill_(v) for k in t if k[:9] != "optimizer"]), "nan or inf")  # fmt: skip
case("best of phase 1", "resume", "equal but best", copy(ONE, BEST))
case("phase 1 gone", "resume", "equal but phase_000001", lambda run: (run / ONE).unlink())
case("best gone, last there", "resume", "equal but best", lambda run: (run / BEST).unlink())

for name, text in {
    "empty": "",
    "garbage": "\x00\xff",
    "a list": "[1]",
    "dead": dead(HERE),
    "text": "x" * 9000,
}.items():
    case(f"run.lock {name}", "resume", "equal", lock(text))
case("run.lock of another machine, late", "resume", "equal", lock(dead("elsewhere"), 500))
case(
    "run.lock of another machine", "resume", "refused", lock(dead("elsewhere")), "wait", "run.lock"
)
for kind in ("directory", "pipe", "link", "device", "dangling link"):
    case(f"run.lock {kind}", "resume", "refused", instead("run.lock", kind), "run.lock")
for file in (
    ".run.json",
    ".metrics.jsonl",
    "checkpoints/.last.safetensors",
    "checkpoints/.best.safetensors",
):
    for kind in ("file", "link", "pipe"):
        case(f"{file}.partial {kind}", "resume", "equal", instead(f"{file}.partial", kind))
    case(
        f"{file}.partial directory",
        "resume",
        "refused",
        instead(f"{file}.partial", "directory"),
        "partial",
    )


def assert_equal(run: Path, whole: Path, *left: str) -> None:
    """A run that ended as the unspoilt one: tensors of every checkpoint, phases, samples."""
    for path in sorted(whole.glob("checkpoints/*")):
        if path.stem in left:
            continue
        ours, theirs = load_file(run / "checkpoints" / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    if "metrics.jsonl" not in left:
        assert _log(run, "metrics.jsonl") == _log(whole, "metrics.jsonl")
    if "samples.jsonl" not in left:
        assert _log(run, "samples.jsonl") == _log(whole, "samples.jsonl")
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def _log(run: Path, file: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / file).read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "cost"} for line in found]


@pytest.mark.parametrize(
    ("command", "ending", "edit", "words"),
    [
        pytest.param(
            *rest,
            id=f"{rest[0]}: {name}",
        )
        for name, *rest in CASES
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_a_spoilt_run(
    here: Path, whole: Path, command: str, ending: str, edit: Edit, words: tuple[str, ...]
) -> None:
    run = here / "RUN"
    edit(run)
    arguments = {
        "resume": ["resume", "RUN"],
        "report": ["report", "RUN"],
        "sample": ["sample", "RUN", "-n", 1, "--gen-len", 2],
        "export": ["export", "RUN", "EXPORTED"],
    }[command]
    if ending == "refused":
        with untouched(here):
            refused(arguments, *words)
        return
    outside = {name: digest for name, digest in contents(here).items() if name[:3] != "RUN"}
    done = accepted(arguments)
    if ending in ("warned", "mended"):
        warned = [line for line in done.err.splitlines() if "warning" in line]
        assert any(all(word in line for word in words) for line in warned), done.err
    left = [words[0]] if ending == "warned" else ending.removeprefix("equal but ").split()
    if ending == "mended" and "backwards" in os.environ["PYTEST_CURRENT_TEST"]:
        left.append("samples.jsonl")  # in order of phases; within one, as they stand
    assert_equal(run, whole, *left)
    assert outside.items() <= contents(here).items()


@pytest.mark.process
@pytest.mark.parametrize("command", ["resume", "sample", "export"])
def test_a_process_refuses_a_spoilt_run_as_the_function_does(
    here: Path, warm_python: Any, command: str
) -> None:
    last = here / "RUN" / LAST
    last.write_bytes(last.read_bytes()[:-1000])
    arguments = ["-m", "rlhf_lab", command, "RUN", *(["made"] if command == "export" else [])]
    with untouched(here):
        done = warm_python.run(arguments, cwd=here)
    sentences = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and len(sentences) == 1, done.stderr
    assert "last.safetensors is corrupt" in sentences[0] and sentences[0].endswith(".")
