"""The rooms: the package stands without what its makers use, and is all that is installed."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKERS = {"tools", "benchmarks", "tests"}


def imported(source: str) -> Iterator[str]:
    """The top-level packages that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.slow
@pytest.mark.parametrize("room", ["rlhf_lab", "solutions"])
def test_what_is_shipped_imports_nothing_of_its_makers(room):
    """Notebooks are built from the scripts in solutions/, which are walked in their place."""
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        assert MAKERS.isdisjoint(imported(file.read_text(encoding="utf-8"))), file


def test_an_import_inside_a_function_is_found():
    source = "import os.path\ndef f():\n    from tools.reel import check\n"
    assert set(imported(source)) == {"os", "tools"}


def test_only_three_files_import_transformer_lens():
    """Later releases may change what they use."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "rlhf_lab").rglob("*.py")}
    importing = {path.name for path, x in sources.items() if "transformer_lens" in imported(x)}
    assert importing == {"hooked_transformer.py", "hooked_model.py", "value_head.py"}


def test_only_the_package_is_installed():
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    patterns = (
        re.search(r"find_packages\(include=\[(.*?)\]\)", source)[1].replace('"', "").split(", ")
    )
    top = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    assert {"rlhf_lab", "tools", "benchmarks"} <= set(top)
    assert [name for name in top if any(fnmatch(name, p) for p in patterns)] == ["rlhf_lab"]
