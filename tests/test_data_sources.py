"""Rows of data sources: what each kind of source contains, and the error for what is broken."""

import pytest

from rlhf_lab.data_sources import read_rows
from rlhf_lab.errors import LoadError

LINES = [{"text": 'a "b"', "n": 1}, {"text": "d\ne", "n": 2.5}]
TWO = ["a, b\tc", "d"]
READ = {
    "bom.csv": ('\ufefftext,n\r\n"a, b\tc",1\r\nd,2\r\n', TWO),
    "break.csv": ('text\n"a\r\nb ""c"""\nNA\nnull\n', ['a\r\nb "c"', "NA", "null"]),
    "x.TSV": ('text\tn\n"a, b\tc"\t1\nd\t2\n', TWO),
    "x.jsonl": ('{"text": "a, b\\tc"}\n\n{"text": "caf\\u00e9\u2028"}\r\n', [TWO[0], "café\u2028"]),
    "x.Json": ('[{"text": "a, b\\tc"},\n {"text": "d"}]', TWO),
    "x.TXT": ("\ufeffa, b\tc\r\n\n \nd\n", TWO),
    "quotes.md": ('"a"\n{"text": 1}\n', ['"a"', '{"text": 1}']),
    "x": (" a \nb", [" a ", "b"]),
}
BROKEN = {
    "latin.txt": (b"caf\xe9\n", "UTF-8"),
    "list.jsonl": (b'["a"]\n', r"line 1 is \['a'\]\. Use an object with 'text'\."),
    "number.jsonl": (
        b'{"text": "a"}\n\n{"text": 3}\n',
        "line 3 has 3 under 'text', which is not a text",
    ),
    "other.jsonl": (b'{"prompt": "a"}\n', "only 'prompt'"),
    "comma.jsonl": (b'{"text": "a"}\n{"text": "b",}\n', "line 2: (Illegal trailing comma|Exp)"),
    "deep.jsonl": (b"[" * 100_000, "line 1: .*recursion"),
    "number.json": (b"3", "not a list"),
    "item.json": (b'[{"text": "a"}, {"text": 3}]', "line 2 has 3 under 'text'"),
    "lines.json": (b'{"text": "a"}\n{"text": "b"}\n', "Extra data"),
    "cells.csv": (b"text,n\na, b,1\n", "line 2 has too many cells"),
    "twice.csv": (b"text,text\na,b\n", "repeated: text, text"),
    "twice.jsonl": (b'{"text": "a", "text": "b"}\n', "line 1: .*repeated: text, text"),
    "twice.json": (b'[{"text": "a", "n": 1, "n": 2}]', "repeated: text, n, n"),
    "empty.csv": (b'text,n\n"a\nb",1\n ,2\n', "line 4 has no text under 'text'"),
    "quote.csv": (b'text,n\na,1\n"b,2\nc,3\n', "not a valid .csv file"),
    "behind.csv": (b'text,n\n"a"b,1\n', "not a valid .csv file"),
    "x.parquet": (b"PAR1", "cannot be loaded"),
    "x.csv.gz": (b"\x1f\x8b", "unknown suffix .gz"),
}


def texts(name, **options):
    return [row.text("text") for row in read_rows(str(name), "texts", **options)]


@pytest.mark.parametrize("name", READ)
def test_read_rows_matches_the_file(tmp_path, name):
    content, expected = READ[name]
    (tmp_path / name).write_bytes(content.encode())
    assert texts(tmp_path / name, lines_as="text") == expected


@pytest.mark.parametrize("name", BROKEN)
def test_read_rows_names_file_and_line_of_an_error(tmp_path, name):
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=words) as error:
        texts(tmp_path / name, lines_as="text")
    assert name in str(error.value) and "\n" not in str(error.value)


def test_read_rows_raises_without_columns_or_file(tmp_path):
    (tmp_path / "x.txt").write_text("a\n")
    for name, words in {
        str(tmp_path / "x.txt"): "has no columns. Use a .jsonl or .csv file",
        str(tmp_path): "is not a file",
        "some/data": r"texts='some/data' .*No such file.*hub:NAME:SPLIT",
    }.items():
        with pytest.raises(LoadError, match=words):
            read_rows(name, "texts")


def test_numbers_are_finite_and_read_from_text(tmp_path):
    values = ["1", '"-2.5"', '"x"', "null", '"nan"', "[1]", "1e999"]
    (tmp_path / "x.jsonl").write_text("".join(f'{{"n": {value}}}\n' for value in values))
    good, negative, *bad = read_rows(str(tmp_path / "x.jsonl"), "pairs")
    assert (good.number("n"), negative.number("n")) == (1.0, -2.5)
    for line, row in enumerate(bad, 3):
        with pytest.raises(LoadError, match=f"line {line} has .* under 'n'"):
            row.number("n")


@pytest.mark.parametrize(
    ("name", "names", "split"),
    [
        ("hub:some/data", ("some/data",), "train"),
        ("hub:some/data:test", ("some/data",), "test"),
        ("hub:some/data:main:test", ("some/data", "main"), "test"),
    ],
)
def test_hub_names_become_arguments_of_load_dataset(monkeypatch, name, names, split):
    calls = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: calls.append((a, k)) or LINES)
    assert texts(name) == ['a "b"', "d\ne"] and calls == [(names, {"split": split})]


def test_hub_errors_are_one_line(monkeypatch):
    def fail(*names, **options):
        raise ConnectionError("no such\ndataset")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(LoadError, match=r"'hub:x/y' with split='train' cannot .* \(no such\)"):
        read_rows("hub:x/y", "texts")
    for name in ("hub:", "hub:a:b:c:d", "hub:a:"):
        with pytest.raises(LoadError, match="does not name a dataset"):
            read_rows(name, "texts")


def test_datasets_reads_parquet_and_directories(tmp_path, monkeypatch, no_network, capsys):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(LINES).to_parquet(tmp_path / "x.parquet")
    capsys.readouterr()
    assert texts(tmp_path / "x.parquet") == ['a "b"', "d\ne"]
    assert capsys.readouterr().err == ""  # no progress bar
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.csv").write_text("text,n\na,1\nb,2\n")
    assert texts(f"hub:{tmp_path / 'data'}:test") == ["a", "b"]
