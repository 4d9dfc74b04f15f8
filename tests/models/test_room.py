"""Test of where TransformerLens is used, which later releases may change."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rlhf_lab"


def test_only_three_files_import_transformer_lens():
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformer_lens" for name in names):
                importing.add(path.name)
    assert importing == {"hooked_transformer.py", "hooked_model.py", "value_head.py"}
