"""A program for each stored record."""

import json

import pytest

from tests.course.test_seed_figures import LESSONS
from tools.course.record import RECORDS
from tools.course.runs import RECORDS_OF_RUNS
from tools.prose import ROOT

STORED = sorted((ROOT / RECORDS).glob("*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_record_names_a_program_that_writes_it(path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    command, name = record["made_by"].split()[3:5]
    assert command == ("runs" if path.stem in RECORDS_OF_RUNS else "record")
    assert name in {"record": LESSONS, "runs": RECORDS_OF_RUNS}[command]
    if command == "runs":
        made = RECORDS_OF_RUNS[name]
        assert record.keys() == {"made_by", *made.heading, *made.parts}
        heading = json.loads(json.dumps(dict(made.heading)))
        assert {entry: record[entry] for entry in heading} == heading
