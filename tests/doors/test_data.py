"""Files of prompts, texts and pairs: read row by row as they stand, or refused with the place."""

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from rlhf_lab.rewards import load_pairs
from rlhf_lab.training.prompts import load_prompts
from rlhf_lab.tuning import load_examples
from tests.doors.data_cases import BROKEN, GOOD, READ, TWO
from tests.doors.door import accepted, refused, untouched

pytestmark = pytest.mark.usefixtures("no_type_checks")
SMALL = "--total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
TRAIN = f"train {SMALL} --out made".split()
FIT = "--out made --steps 1 --batch-size 2".split()


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", READ)
def test_the_rows_of_a_file_are_read_as_they_stand(name) -> None:
    file, content, texts = READ[name]
    Path(file).write_bytes(content)
    assert load_prompts(file) == texts
    assert load_examples(file, 1, 0, column="prompt").texts == texts


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_broken_is_refused_with_the_place(there, name) -> None:
    file, content, words = BROKEN[name]
    Path(file).write_bytes(content)
    began = time.process_time()
    with untouched(there):
        refused([*TRAIN, "--prompts", file], *words)
    assert time.process_time() - began < 5


PAIRS = [{"chosen": "a good movie", "rejected": "a bad movie"}, {"chosen": "c", "rejected": "d"}]


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


GOOD_PAIRS = {
    "JSONL": ("x.jsonl", lines_of(PAIRS)),
    "JSON": ("x.json", json.dumps(PAIRS)),
    "CSV": ("x.csv", "chosen,rejected\na good movie,a bad movie\nc,d\n"),
    "CSV, the other way round": ("x.csv", "rejected,chosen\na bad movie,a good movie\nd,c\n"),
    "TSV": ("x.TSV", "chosen\trejected\na good movie\ta bad movie\nc\td\n"),
    "CSV, quotes": ("x.csv", 'chosen,rejected\n"a good movie","a bad movie"\nc,"d"\n'),
}
BAD_PAIRS = {
    "one pair": ("x.jsonl", lines_of(PAIRS[:1]), ["1 pairs", "at least 2"]),
    "none": ("x.jsonl", "", ["0 pairs", "at least 2"]),
    "lines of text": ("x.txt", "a\nb\n", ["x.txt", "no columns"]),
    "no rejected": ("x.jsonl", lines_of([{"chosen": "a"}] * 2), ["line 1", "'rejected'", "chosen"]),
    "rejected empty": ("x.csv", "chosen,rejected\na,\nb,c\n", ["line 2", "'rejected'"]),
    "other columns": ("x.csv", "good,bad\na,b\nc,d\n", ["line 2", "'chosen'", "'good', 'bad'"]),
    "columns that are lists": (
        "x.json",
        json.dumps([{"chosen": ["a"], "rejected": "b"}] * 2),
        ["item 1", "'chosen'"],
    ),
    "chosen twice": ("x.csv", "chosen,chosen,rejected\na,b,c\n", ["'chosen'", "2 times"]),
    "a surplus comma": (
        "x.csv",
        "chosen,rejected\ngood, but long,bad\nc,d\n",
        ["line 2", "quotes"],
    ),
    "latin-1": ("x.csv", b"chosen,rejected\ncaf\xe9,b\nc,d\n", ["UTF-8"]),
    "words that Reel lacks": (
        "x.jsonl",
        lines_of([{"chosen": "quantum", "rejected": "x"}] * 2),
        ["vocabulary"],
    ),
    "half a character": ("x.jsonl", '{"chosen": "\\ud800", "rejected": "bad"}\n' * 2, ["ud800"]),
}
WRONG_COLUMNS = {
    "prompts": (["dpo", "--prompt-column", "q"], ["line 1", "'q'", "chosen"]),
    "prompts of ORPO": (["orpo", "--prompt-column", "q"], ["line 1", "'q'", "chosen"]),
    "prompts of a reward": (["train-reward", "--prompt-column", "q"], ["line 1", "'q'"]),
    "margins": (["train-reward", "--margin", "1"], ["line 1", "number", "'margin'"]),
}


def put(file: str, content: str | bytes) -> None:
    Path(file).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", GOOD_PAIRS)
def test_the_pairs_of_a_file_are_read_as_they_stand(name) -> None:
    put(*GOOD_PAIRS[name])
    pairs = load_pairs(GOOD_PAIRS[name][0], 1, 0)
    found = [
        {"chosen": a, "rejected": b} for a, b in zip(pairs.chosen, pairs.rejected, strict=True)
    ]
    assert found == PAIRS


@pytest.mark.parametrize("command", ["dpo", "orpo", "train-reward"])
@pytest.mark.parametrize("name", BAD_PAIRS)
def test_pairs_that_are_broken_are_refused(there, name, command) -> None:
    file, content, words = BAD_PAIRS[name]
    put(file, content)
    with untouched(there):
        refused([command, "--pairs", file, *FIT], *words)


BAD_JUDGED = {
    "none": ("x.jsonl", "", ["0 good texts"]),
    "lines of text": ("x.txt", "a\nb\n", ["x.txt", "no columns"]),
    "one pair": ("x.jsonl", lines_of(PAIRS[:1]), ["1 pairs", "at least 2"]),
    "all good": ("x.csv", "response,label\na,good\nb,1\n", ["2 good texts and 0 bad"]),
    "no label": ("x.csv", "response\na\n", ["line 2", "'label'", "good, true"]),
    "another label": ("x.csv", "response,label\na,fine\n", ["line 2", "'fine'"]),
    "no response": ("x.csv", "text,label\na,good\n", ["line 2", "'response'", "'text'"]),
    "words that Reel lacks": (
        "x.csv",
        "response,label\nquantum,good\nx,bad\nx,bad\n",
        ["vocabulary"],
    ),
}


@pytest.mark.parametrize("name", BAD_JUDGED)
def test_judged_texts_that_are_broken_are_refused(there, name) -> None:
    file, content, words = BAD_JUDGED[name]
    put(file, content)
    with untouched(there):
        refused([*DOORS["kto"], file], *words)


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_a_column_that_is_not_there_is_named(there, name) -> None:
    command, words = WRONG_COLUMNS[name]
    put("x.jsonl", lines_of(PAIRS))
    with untouched(there):
        refused([*command, "--pairs", "x.jsonl", *FIT], *words)


@pytest.mark.parametrize("value", ['"x"', "null", "NaN", "Infinity", "[1]", '"1e999"'])
def test_a_margin_that_is_no_number_is_refused(there, value) -> None:
    put("x.jsonl", f'{{"chosen": "good", "rejected": "bad", "margin": {value}}}\n' * 2)
    with untouched(there):
        refused(["train-reward", "--margin", "1", "--pairs", "x.jsonl", *FIT], "'margin'")


DOORS = {
    "train": [*TRAIN, "--prompts"],
    "sft": ["sft", *FIT, "--texts"],
    "dpo": ["dpo", *FIT, "--pairs"],
    "orpo": ["orpo", *FIT, "--pairs"],
    "kto": ["kto", *FIT, "--examples"],
    "train-reward": ["train-reward", *FIT, "--pairs"],
}
PLACES = {
    "no file": (lambda path: None, ["No such file"]),
    "a directory": (Path.mkdir, ["Is a directory"]),
    "a dangling link": (lambda path: path.symlink_to("gone"), ["No such file"]),
    "a link to itself": (lambda path: path.symlink_to(path), ["symbolic links"]),
    "a pipe": (os.mkfifo, ["pipe or a device"]),
    "a link to zeros without end": (lambda path: path.symlink_to("/dev/zero"), ["device"]),
    "a link to nothing": (lambda path: path.symlink_to("/dev/null"), ["device"]),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", PLACES)
def test_a_place_without_rows_is_refused(there, name, door) -> None:
    make, words = PLACES[name]
    make(there / "x.jsonl")
    before = sorted(os.listdir())
    refused([*DOORS[door], "x.jsonl"], "x.jsonl", *words)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "name", ["", " ", "x" * 300, "hub:", "hub:a:", "movie-reviews:junk", "nowhere/"]
)
def test_a_name_of_no_source_is_refused(there, name, door) -> None:
    with untouched(there):
        refused([*DOORS[door], name])


def test_a_link_to_a_file_is_read(there) -> None:
    put("real.txt", TWO)
    Path("link.txt").symlink_to("real.txt")
    assert load_prompts("link.txt") == GOOD


@pytest.mark.parametrize("file", ["p.csv", "p.jsonl", "p.txt"])
def test_a_run_continues_the_prompts_of_its_file(file) -> None:
    content = {"p.csv": b"prompt\nthe plot\nwow folks\n", "p.txt": b"the plot\r\nwow folks\r\n"}
    put(file, content.get(file, b'{"prompt": "the plot"}\n{"prompt": "wow folks"}\n'))
    accepted([*TRAIN, "--prompts", file, "--batch-size", "8"])
    rows = [json.loads(line) for line in Path("made", "samples.jsonl").read_text().splitlines()]
    assert {" ".join(row["text"].split()[:2]) for row in rows} == {"the plot", "wow folks"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["holds no text"]),
        ("\n \n", ["holds no text"]),
        ("this movie\n", ["2"]),
        ("quantum physics\nthis movie\n", ["vocabulary"]),
    ],
    ids=ascii,
)
def test_texts_of_which_nothing_can_be_learned_are_refused(there, content, words) -> None:
    put("x.txt", content)
    with untouched(there):
        refused(["sft", "--texts", "x.txt", *FIT], *words)


@pytest.mark.parametrize("command", ["sft", "dpo", "orpo", "kto", "train-reward"])
def test_a_text_of_10_mb_is_cut_before_it_is_read_in_tokens(command) -> None:
    row = {"text": "good " * 2_000_000, "chosen": "good " * 2_000_000, "rejected": "bad"}
    put("x.jsonl", lines_of([row] * 2))
    door = DOORS[command]
    began = time.process_time()
    accepted([*door, "x.jsonl", "--held-out", "0.5"])
    assert time.process_time() - began < 10


SCORED = {
    "lines": (b"good\nbad\n", ["good", "bad"]),
    "no last break": (b"good\nbad", ["good", "bad"]),
    "CRLF": (b"good\r\nbad\r\n", ["good", "bad"]),
    "blank lines": (b"\ngood\n \n\nbad\n", ["good", "bad"]),
    "a BOM": (b"\xef\xbb\xbfgood\nbad\n", ["good", "bad"]),
}
NOT_SCORED = {
    "nothing": (b"", ["no text"]),
    "blank lines": (b"\n \n", ["no text"]),
    "latin-1": (b"good\ncaf\xe9\n", ["UTF-8"]),
    "UTF-16": ("good\n".encode("utf-16"), ["UTF-8"]),
    "UTF-16 without BOM": ("good\n".encode("utf-16-le"), ["UTF-8"]),
    "a cut character": (b"good \xe2\x82", ["UTF-8"]),
    "NUL": (b"go\0od\n", ["UTF-8"]),
}


def give(monkeypatch, content: bytes) -> None:
    """Put this on standard input, which reads strictly as that of a process in UTF-8."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


@pytest.mark.parametrize("name", SCORED)
def test_each_line_of_standard_input_is_scored(monkeypatch, name) -> None:
    content, texts = SCORED[name]
    asked = accepted(["score", *texts]).out
    give(monkeypatch, content)
    assert accepted(["score"]).out == asked


@pytest.mark.parametrize("name", NOT_SCORED)
def test_standard_input_that_is_no_text_is_refused(monkeypatch, name) -> None:
    content, words = NOT_SCORED[name]
    give(monkeypatch, content)
    refused(["score"], *words)


def test_standard_input_that_is_closed_is_no_text(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    refused(["score"], "no text")


def test_a_line_of_10_mb_is_scored_in_time(monkeypatch) -> None:
    give(monkeypatch, b"good " * 2_000_000)
    began = time.process_time()
    assert accepted(["score"]).out.startswith(accepted(["score", "good " * 500]).out[:6])
    assert time.process_time() - began < 10


@pytest.mark.process
@pytest.mark.parametrize(("content", "said"), [("good\nbad\n", ""), ("", "no text")])
def test_a_process_reads_its_standard_input(warm_python, content, said) -> None:
    done = warm_python.run(["-m", "rlhf_lab", "score"], text=content)
    assert "Traceback" not in done.stderr and said in done.stderr
    assert done.stdout.count("\n") == content.count("\n")
    assert done.returncode == (2 if said else 0)
