"""Names that say the thing: each public name has one home in the package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "rlhf_lab"
# each file of exercises lists its own; the course's registry collects them
SAID_IN_EACH_FILE = {"EXERCISES"}


def modules() -> list[Path]:
    """The files of the package."""
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 130
    return found


def public_names(source: str) -> Iterator[str]:
    """What a module defines at its top level, but for what begins with an underscore."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def test_no_public_name_is_defined_in_two_files():
    homes = defaultdict(set)
    for path in modules():
        for name in public_names(path.read_text(encoding="utf-8")):
            homes[name].add(str(path.relative_to(PACKAGE)))
    twice = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert set(twice) == SAID_IN_EACH_FILE, twice


def test_every_kind_of_definition_is_seen():
    source = "import a\nB = 1\nC: int = 2\n_D = 3\ndef e(): f = 1\nclass G: h = 1\ni.j = 1\n"
    assert list(public_names(source)) == ["B", "C", "e", "G"]
