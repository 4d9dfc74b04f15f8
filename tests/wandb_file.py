"""The records of an offline run's .wandb file, which `wandb sync` would send.

The file is a log as LevelDB's: after a header of 7 bytes, blocks of 32 KiB of pieces, each with a
checksum, its length, and whether it is a whole record or the first, a middle or the last part.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK, PIECE = 7, 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def raw_records(path: Path) -> Iterator[bytes]:
    """Return the records of the file, in order, without one that a kill cut off."""
    data, at, parts = path.read_bytes(), HEADER, b""
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
    """Return entries by their key, or by a path of keys joined by a dot."""
    found = {}
    for item in records:
        name, value = ".".join(item.nested_key) or item.key, json.loads(item.value_json)
        is_media = isinstance(value, dict) and "_type" in value  # apart in the history already
        found |= {f"{name}.{k}": v for k, v in value.items()} if is_media else {name: value}
    return found


class WandbFile:
    """The records of a directory such as `wandb/offline-run-20261123_040907-abcdefgh`.

    Attributes:
        run: the first record about the run: its name, project, group, tags, notes.
        history: the logged values of each step.
        summary: the last of each logged value, or the value that was set.
        exit_codes: one code; none if the run was killed.
    """

    def __init__(self, directory: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        self.directory, self.run = directory, None
        self.history, self.summary, self.exit_codes = [], {}, []
        (path,) = directory.glob("run-*.wandb")
        for record in map(Record.FromString, raw_records(path)):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = self.run or record.run
            elif kind == "history":
                self.history.append(items(record.history.item))
                self.summary |= self.history[-1]
            elif kind == "summary":
                self.summary |= items(record.summary.update)
            elif kind == "exit":
                self.exit_codes.append(record.exit.exit_code)

    def table(self, row: dict[str, Any], name: str) -> dict[str, Any]:
        """Return columns and data of a table that a row of the history names."""
        assert row[f"{name}._type"] == "table-file"
        return json.loads((self.directory / "files" / row[f"{name}.path"]).read_text("utf-8"))
