"""Files of prompts, texts, pairs and labeled texts at each command, and standard input."""

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.bad_input.command_outcome import accepted, rejected, untouched

pytestmark = pytest.mark.usefixtures("no_type_checks")
SMALL = "--total-phases 1 --batch-size 8 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
TRAIN = f"train {SMALL} --out made".split()
FIT = "--out made --steps 1 --batch-size 2 --samples 0".split()
COMMANDS = {
    "train": [*TRAIN, "--prompts"],
    "sft": ["sft", *FIT, "--texts"],
    "dpo": ["dpo", *FIT, "--pairs"],
    "orpo": ["orpo", *FIT, "--pairs"],
    "kto": ["kto", *FIT, "--examples"],
    "train-reward": ["train-reward", *FIT[:-2], "--pairs"],
}
PAIR = {"chosen": "a good movie", "rejected": "a bad movie"}
PAIRS = ("dpo", "orpo", "train-reward")


def to_lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


BROKEN = {
    "broken line": (tuple(COMMANDS), "x.jsonl", '{"a": 1,}\n', ["x.jsonl", "line 1"]),
    "another column": (tuple(COMMANDS), "x.csv", "good\na\nb\n", ["line 2", "'good'"]),
    "unknown suffix": (tuple(COMMANDS), "x.xlsx", "PK", [".xlsx"]),
    "unknown words": (("train", "sft"), "x.txt", "quantum\nthis\n", ["vocabulary"]),
    "a long prompt": (("train",), "x.txt", "this movie was good . " * 30, ["context"]),
    "no texts": (("sft",), "x.txt", "\n \n", ["texts has 0 rows", "at least 2"]),
    "lines as pairs": (PAIRS, "x.txt", "a\nb\n", ["x.txt", "no columns"]),
    "one pair": (PAIRS, "x.jsonl", to_lines(PAIR), ["pairs has 1 rows", "at least 2"]),
    "pairs of unknown words": (
        PAIRS,
        "x.jsonl",
        to_lines({"chosen": "quantum", "rejected": "x"}) * 2,
        ["vocabulary"],
    ),
    "half a surrogate pair": (
        PAIRS,
        "x.jsonl",
        '{"chosen": "\\ud800", "rejected": "bad"}\n' * 2,
        ["ud800"],
    ),
    "all good": (("kto",), "x.csv", "response,label\na,good\nb,1\n", ["2 good texts and 0 bad"]),
    "no label": (("kto",), "x.csv", "response\na\n", ["line 2", "'label'", "good, true"]),
    "no response": (("kto",), "x.csv", "text,label\na,good\n", ["line 2", "'response'"]),
    "semicolons": (("train",), "x.csv", "prompt;label\nthis movie;good\n", ["x.csv", "prompt"]),
    "a row too long": (("train",), "x.csv", "prompt\nthis movie,was so good\n", ["line 2"]),
    "equal texts": (
        ("train-reward",),
        "x.jsonl",
        to_lines(PAIR | {"rejected": PAIR["chosen"]}) * 2,
        ["chosen", "rejected"],
    ),  # fmt: skip
}
CASES = [(command, name) for name, case in BROKEN.items() for command in case[0]]


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_broken_file_is_one_line(there, command, name) -> None:
    _, file, content, words = BROKEN[name]
    Path(file).write_text(content)
    with untouched(there):
        rejected([*COMMANDS[command], file], *words)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["", "missing.jsonl", "directory", "pipe", "hub:", "x" * 300])
def test_a_missing_source_is_one_line(there, command, name) -> None:
    Path("directory").mkdir()
    os.mkfifo("pipe")
    rejected([*COMMANDS[command], name])
    assert sorted(os.listdir()) == ["directory", "pipe"]


@pytest.mark.parametrize(
    ("options", "words"),
    [(["dpo", "--prompt-column", "q"], "'q'"), (["train-reward", "--prompt-column", "q"], "'q'"),
     (["train-reward", "--margin", "1"], "'margin'")],
)  # fmt: skip
def test_a_missing_column_is_named(there, options, words) -> None:
    Path("x.jsonl").write_text(to_lines(PAIR, PAIR | {"rejected": "bad"}))
    rejected([*options, "--pairs", "x.jsonl", "--out", "made"], "line 1", words, "chosen")


def test_a_run_continues_the_prompts_of_its_file() -> None:
    Path("p.csv").write_text("prompt\nthe plot\nwow folks\n")
    accepted([*TRAIN, "--prompts", "p.csv"])
    rows = [json.loads(line) for line in Path("made", "samples.jsonl").read_text().splitlines()]
    assert {" ".join(row["text"].split()[:2]) for row in rows} == {"the plot", "wow folks"}


def test_a_text_of_10_mb_is_truncated_before_tokenization() -> None:
    row = {"text": "good " * 2_000_000, "chosen": "good " * 2_000_000, "rejected": "bad"}
    Path("x.jsonl").write_text(to_lines(row) * 2)
    for command in ("sft", "dpo"):
        start = time.process_time()
        accepted([*COMMANDS[command], "x.jsonl", "--out", command, "--held-out", "0.5"])
        assert time.process_time() - start < 10


STDIN = {
    "lines": (b"good\nbad\n", ["good", "bad"]),
    "CRLF": (b"good\r\n \r\nbad", ["good", "bad"]),
    "BOM": (b"\xef\xbb\xbfgood\n", ["good"]),
    "nothing": (b"\n \n", "no text"),
    "latin-1": (b"good\ncaf\xe9\n", "UTF-8"),
}


@pytest.mark.parametrize("name", STDIN)
def test_score_reads_lines_of_standard_input(monkeypatch, name) -> None:
    content, expected = STDIN[name]
    stream = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    if isinstance(expected, str):
        rejected(["score"], expected)
    else:
        done = accepted(["score", "--reward-fn", "zero"])
        assert done.out == "".join(f"0.0000\t{text}\n" for text in expected)
