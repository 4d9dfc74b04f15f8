"""Names: each public name has one home in the package."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.faults import inject, read_faults

PACKAGE = Path(__file__).parent.parent / "rlhf_lab"
IN_EACH_FILE = {"EXERCISES"}  # the registry of the course collects them


def public_names(source: str) -> set[str]:
    """Return the names that a module defines at its top level."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_no_public_name_is_defined_in_two_files():
    homes = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in public_names(path.read_text(encoding="utf-8")):
            homes[name].add(path.relative_to(PACKAGE).as_posix())
    repeated = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert set(repeated) == IN_EACH_FILE, repeated
    assert len(homes) > 1000


def test_lines_of_faults_fit_source_and_tests():
    for fault in read_faults():
        inject(fault)  # raises if the old text does not occur exactly once
        for name in fault.tests:
            file, *functions = name.split("::")
            path = Path(__file__).parent / file
            missing = [x for x in functions if f"def {x.split('[')[0]}(" not in path.read_text()]
            assert path.exists() and not missing, f"{fault}: there is no test {name}"
