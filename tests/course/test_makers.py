"""Programs of stored records: hand-computed values, and a program for each record."""

import json
from importlib.resources import files
from importlib.util import find_spec

import pytest

from tools.prose import ROOT

RECORDS = sorted(
    path for path in (files("rlhf_lab.course") / "records").iterdir() if path.name.endswith(".json")
)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_record_names_a_program_that_writes_it(path) -> None:
    module = json.loads(path.read_text(encoding="utf-8"))["made_by"].split()[2]
    assert module.startswith("tools.course") and find_spec(module) is not None
    if module != "tools.course":
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        call = f'"{path.name.removesuffix(".json")}"'
        assert call in source.split("make_record(")[-1] and f'"{module.split(".")[-1]}"' in source
