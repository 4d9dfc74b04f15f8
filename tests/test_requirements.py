"""Requirements: ranges in the metadata, pins within them in the lock, and a bare clone."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


RANGES = [Requirement(line) for line in lines("requirements.txt")]
PINS = {plain(r.name): r for r in map(Requirement, lines("requirements.lock"))}


@pytest.mark.parametrize("asked", RANGES, ids=str)
def test_a_range_has_a_lower_bound_and_holds_the_version_that_is_tested(asked):
    operators = {specifier.operator for specifier in asked.specifier}
    assert ">=" in operators and not operators & {"==", "~=", "==="}
    assert operators == {">="} or asked.name == "transformer_lens", "nothing else is known to break"
    (pin,) = PINS[plain(asked.name)].specifier
    assert pin.operator == "==" and asked.specifier.contains(pin.version)


def test_the_lock_pins_everything_once():
    assert len(PINS) == len(lines("requirements.lock")) > 100
    for pin in PINS.values():
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "+" not in specifier.version, pin


@pytest.mark.slow
def test_no_file_installs_the_unregistered_name_rlhf_lab():
    """Anybody could register it on PyPI. The extra `dev` refers to the package's own extras."""
    by_name = re.compile(r"""\bpip install(\s+-\S+)*\s+[\\"'`]*rlhf[_-]lab\b(?!-)|rlhf_lab\[""")
    assert by_name.search("%pip install --quiet rlhf_lab==0.1") and by_name.search('"rlhf_lab[a]"')
    folders = ("rlhf_lab", "notebooks", "solutions", "docs", "tools", "benchmarks")
    files = [*ROOT.glob("*.md"), ROOT / "Makefile"]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*")]
    texts = {".py", ".md", ".toml", ".ipynb", ".json", ""}
    files = [path for path in files if path.is_file() and path.suffix in texts]
    assert not [path for path in files if by_name.search(path.read_text("utf-8"))]
