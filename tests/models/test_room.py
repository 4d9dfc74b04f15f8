"""Test of the files that use TransformerLens, which later releases may change."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rlhf_lab"


def test_only_three_files_import_transformer_lens():
    statement = re.compile(r"^\s*(from|import) transformer_lens\b", re.MULTILINE)
    importing = {path.name for path in PACKAGE.rglob("*.py") if statement.search(path.read_text())}
    assert importing == {"hooked_transformer.py", "hooked_model.py", "value_head.py"}
