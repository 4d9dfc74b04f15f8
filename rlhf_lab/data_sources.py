"""Data sources: rows of text from a file, a dataset of the Hugging Face hub, or sums."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from rlhf_lab.errors import LoadError
from rlhf_lab.files import expand_home
from rlhf_lab.organism.sums import load_sums_prompts

HUB, SUMS = "hub:", "sums"
TEXT, LABEL, PROMPT = "text", "label", "prompt"
FILES = "a .txt, .jsonl, .json, .csv, .tsv or .parquet file, or hub:NAME:SPLIT"


class Row(NamedTuple):
    """A row of data and its location, for error messages."""

    fields: Any
    where: str

    def has(self, column: str) -> bool:
        """Return True if the row has a column."""
        return isinstance(self.fields, dict) and column in self.fields

    def text(self, column: str) -> str:
        """Return the text in a column, or raise LoadError."""
        value = self.fields[column] if self.has(column) else None
        if not isinstance(value, str) or not value.strip():
            raise LoadError(self._missing("text", column))
        return value

    def number(self, column: str) -> float:
        """Return the finite number in a column, which a CSV file stores as text."""
        try:
            value = float(self.fields[column])
        except (LookupError, TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise LoadError(self._missing("number", column))
        return value

    def _missing(self, kind: str, column: str) -> str:
        if not isinstance(self.fields, dict):
            return f"{self.where} is {self.fields!r:.40}. Use an object with {column!r}."
        if self.has(column) and str(value := self.fields[column] or "").strip():
            remedy = "Write one text" if isinstance(value, list | dict) else "Put it in quotes"
            wanted = f"a text. {remedy}" if kind == "text" else "a finite number. Correct it"
            return f"{self.where} has {value!r:.40} under {column!r}, which is not {wanted}."
        names = [f"{name!s:.40}" for name in self.fields]
        has_others = names and column not in names
        columns = f", only {', '.join(map(repr, names[:5]))}" if has_others else ""
        return f"{self.where} has no {kind} under {column!r}{columns}. Every row needs that column."


def find_prompt_column(rows: list[Row], column: str | None) -> str | None:
    """Return the given column; if it is None, `prompt` if the rows have it."""
    return PROMPT if column is None and rows and rows[0].has(PROMPT) else column


def read_rows(name: str, field: str, lines_as: str | None = None) -> list[Row]:
    """Read all rows of a source.

    1. `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`: a dataset of the hub or of a
       directory; the split is train by default.
    2. `sums`, `sums:2,3` or `sums:4c`: prompts of the bundled language, see `load_sums_prompts`.
    3. Anything else: a file. A .jsonl file has an object per line, a .json file a list of them,
       .csv, .tsv and .parquet files have columns, and .txt, .md and files without a suffix a text
       per line.

    Args:
        field: the argument with this name, for error messages.
        lines_as: the column for the lines of a plain text file; only text and prompt can be one.

    Raises:
        LoadError: If the source does not exist or has another format.
    """
    if name.partition(":")[0] == SUMS:
        texts = load_sums_prompts(name)
        return [Row({PROMPT: text}, f"{name}, row {n}") for n, text in enumerate(texts)]
    suffix = (path := expand_home(name)).suffix.lower()
    if name.startswith(HUB):
        dataset, *rest = name.removeprefix(HUB).split(":")
        if not dataset or len(rest) > 2 or "" in rest:
            raise LoadError(f"{name!r} does not name a dataset. Use hub:NAME or hub:NAME:SPLIT.")
        split = rest[-1] if rest else "train"
        load = lambda datasets: datasets.load_dataset(dataset, *rest[:-1], split=split)
        return _rows_of_datasets(load, name, f" with split={split!r}")
    try:
        if path.exists() and not path.is_file():  # a named pipe would block
            raise LoadError(f"{field}={name!r} is not a file. Use {FILES}.")
        if suffix == ".parquet" and path.exists():
            # streamed: no copy in a cache; load_dataset would also report the load to a server
            load = lambda datasets: datasets.Dataset.from_parquet(str(path), streaming=True)
            return _rows_of_datasets(load, name)
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = _file_rows(file, suffix, lines_as)
            return [Row(fields, f"{path}, line {n}") for n, fields in rows]
    except OSError as error:
        reason = error.strerror
        raise LoadError(f"{field}={name!r} cannot be read ({reason}). Use {FILES}.") from None
    except (ValueError, csv.Error, RecursionError) as error:
        kind = suffix or "text"
        raise LoadError(f"{path} is not a valid {kind} file in UTF-8 ({error}).") from None


def _file_rows(file: TextIO, suffix: str, lines_as: str | None) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line, or of an item of a .json file, with its fields."""
    if suffix in (".csv", ".tsv"):  # pandas, which datasets uses, accepts shifted cells
        table = csv.DictReader(file, delimiter="," if suffix == ".csv" else "\t", strict=True)
        _to_fields([(name, None) for name in table.fieldnames or []])
        for fields in table:
            if None in fields:
                raise ValueError(f"line {table.line_num} has too many cells; quote them")
            yield table.line_num, fields
    elif suffix == ".json":
        rows = json.load(file, object_pairs_hook=_to_fields)
        if not isinstance(rows, list):
            raise ValueError("it is not a list of objects")
        yield from enumerate(rows, 1)
    elif suffix == ".jsonl":
        for n, line in enumerate(file, 1):
            try:
                if line.strip():
                    yield n, json.loads(line, object_pairs_hook=_to_fields)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {n}: {error}") from None
    elif suffix not in ("", ".txt", ".text", ".md"):
        raise LoadError(f"{file.name} has the unknown suffix {suffix}. Use {FILES}.")
    elif lines_as not in (TEXT, PROMPT):
        raise LoadError(f"{file.name} has no columns. Use a .jsonl or .csv file.")
    else:
        lines = ((n, line.rstrip("\r\n")) for n, line in enumerate(file, 1))
        yield from ((n, {lines_as: line}) for n, line in lines if line.strip())


def _to_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a row; raise ValueError for a repeated name, whose first value would be lost."""
    if len(fields := dict(pairs)) < len(pairs):
        raise ValueError(f"a column name is repeated: {', '.join(name for name, _ in pairs)}")
    return fields


def _rows_of_datasets(load: Callable[[Any], Any], source: str, part: str = "") -> list[Row]:
    """Load rows with the library datasets, without its log messages."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return [Row(fields, f"{source}, row {n}") for n, fields in enumerate(load(datasets))]
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "Use another dataset, or a .jsonl or .csv file."
        raise LoadError(f"{source!r}{part} cannot be loaded ({reason:.200}). {remedy}") from None
