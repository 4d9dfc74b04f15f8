"""Files of prompts, texts, pairs and labeled texts at each command, and standard input.

The readers are tested in test_data_sources.py, rewards/test_pairs.py, tuning/test_examples.py.
"""

import io
import sys
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
PAIRS = ("dpo", "orpo", "train-reward")
PAIR = '{"chosen": "a good movie", "rejected": "a bad movie"}\n'
UNKNOWN = PAIR.replace("good", "quantum")
BROKEN = [  # commands, file, content, words of the message
    (tuple(COMMANDS), "x.jsonl", '{"a": 1,}\n', ["x.jsonl", "line 1"]),
    (PAIRS, "x.jsonl", '{"chosen": [{}], "rejected": ""}\n', ["[{}] under", "Write one text"]),
    (tuple(COMMANDS), "x.csv", "good\na\nb\n", ["line 2", "'good'"]),
    (("train", "sft"), "x.txt", "quantum\nthis\n", ["vocabulary"]),
    (("train",), "x.txt", "this\n" + "this movie was good . " * 30, ["context", "prompt 2"]),
    (("sft",), "x.txt", "\n \n", ["texts must have at least 2 rows", "got 0"]),
    (PAIRS, "x.jsonl", PAIR, ["pairs must have at least 2 rows", "got 1"]),
    (PAIRS, "x.jsonl", UNKNOWN * 2, ["the word 'a'", "(number ", "vocabulary"]),
    (PAIRS, "x.jsonl", PAIR.replace("good", "\\ud800") * 2, ["ud800"]),
]


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case[2][:20])
def test_command_rejects_a_broken_file(there, case) -> None:
    commands, file, content, words = case
    Path(file).write_text(content)
    for command in commands:
        with untouched(there):
            rejected([*COMMANDS[command], file], *words)


STDIN = {
    "lines": (b"good\nbad\n", ["good", "bad"]),
    "CRLF": (b"good\r\n \r\nbad", ["good", "bad"]),
    "BOM": (b"\xef\xbb\xbfgood\n", ["good"]),
    "nothing": (b"\n \n", "no text"),
    "latin-1": (b"good\ncaf\xe9\n", "Standard input is not in UTF-8"),
}


@pytest.mark.parametrize("name", STDIN)
def test_score_reads_lines_of_standard_input(monkeypatch, name) -> None:
    content, expected = STDIN[name]
    stream = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stream)
    if isinstance(expected, str):
        rejected(["score"], expected)
    else:
        done = accepted(["score", "--reward-fn", "zero"])
        assert done.out == "".join(f"0.0000\t{text}\n" for text in expected)
