"""The records of an offline run's .wandb file, which `wandb sync` would send.

The file is a log as LevelDB's: after a header of 7 bytes, blocks of 32 KiB of pieces, each with a
checksum, its length, and whether it is a whole record or the first, a middle or the last part.
"""

import json
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

HEADER, BLOCK, PIECE = 7, 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def raw_records(path: Path) -> Iterator[bytes]:
    """The records of the file, in order; one that a kill cut off is left out."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} is no file of wandb's"
    at, parts = HEADER, b""
    while at + PIECE <= len(data):
        if BLOCK - at % BLOCK < PIECE:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + PIECE])
        if kind == 0 or at + PIECE + length > len(data):
            return
        piece = data[at + PIECE : at + PIECE + length]
        at += PIECE + length
        parts = piece if kind in (WHOLE, FIRST) else parts + piece
        if kind in (WHOLE, LAST):
            yield parts


def items(records: Any) -> dict[str, Any]:
    """Entries of wandb's, each a key, or a path of keys joined by a dot, and JSON."""
    found = {}
    for item in records:
        name, value = ".".join(item.nested_key) or item.key, json.loads(item.value_json)
        is_media = isinstance(value, dict) and "_type" in value  # apart in the history already
        found |= {f"{name}.{k}": v for k, v in value.items()} if is_media else {name: value}
    return found


class WandbFile:
    """The records of a directory such as `wandb/offline-run-20261123_040907-abcdefgh`."""

    def __init__(self, directory: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        self.directory = directory
        (path,) = directory.glob("run-*.wandb")
        self.records = [Record.FromString(raw) for raw in raw_records(path)]

    def of(self, kind: str) -> list[Any]:
        """The records of one kind: run, config, history, summary, exit, ..."""
        return [getattr(r, kind) for r in self.records if r.WhichOneof("record_type") == kind]

    @cached_property
    def run(self) -> Any:
        """The first record about the run: its name, project, group, tags, notes."""
        return self.of("run")[0]

    @property
    def config(self) -> dict[str, Any]:
        return items(self.run.config.update)

    @property
    def history(self) -> list[dict[str, Any]]:
        return [items(record.item) for record in self.of("history")]

    @property
    def summary(self) -> dict[str, Any]:
        """The last of each logged value, or the value that was set."""
        found: dict[str, Any] = {}
        for record in self.records:
            if record.WhichOneof("record_type") == "history":
                found |= items(record.history.item)
            if record.WhichOneof("record_type") == "summary":
                found |= items(record.summary.update)
        return found

    @property
    def exit_codes(self) -> list[int]:
        """One code; none if the run was killed."""
        return [record.exit_code for record in self.of("exit")]

    def table(self, row: dict[str, Any], name: str) -> dict[str, Any]:
        """Columns and data of a table that a row of the history names."""
        assert row[f"{name}._type"] == "table-file"
        return json.loads((self.directory / "files" / row[f"{name}.path"]).read_text("utf-8"))
