"""Tests that one room of the package knows TransformerLens, and that nobody hears its warning."""

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rlhf_lab.models.transformer_lens import make_model

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "rlhf_lab" / "models" / "transformer_lens"
SOURCES = ("rlhf_lab", "benchmarks", "solutions", "tests", "tools")


def imported_modules(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.slow
def test_only_the_room_imports_transformer_lens():
    files = [path for folder in SOURCES for path in ROOT.joinpath(folder).rglob("*.py")]
    assert len(files) > 200
    importing = {path for path in files if "transformer_lens" in imported_modules(path)}
    assert importing and all(path.is_relative_to(ROOM) for path in importing)


INTERNALS = re.compile(
    r"\b(_W_[KV]|_b_[KV]|context_level|previous_attention_mask|past_(keys|values)|rotary_(cos|sin)"
    r"|rotate_every_two|_extend_rotary_embeddings|load_and_process_state_dict)\b"
)


def test_no_internal_name_of_the_library_stands_outside_the_room():
    files = [f for f in (ROOT / "rlhf_lab").rglob("*.py") if not f.is_relative_to(ROOM)]
    found = {f.name: INTERNALS.findall(f.read_text("utf-8")) for f in files}
    assert {name: internals for name, internals in found.items() if internals} == {}
    inside = "".join(f.read_text("utf-8") for f in ROOM.glob("*.py"))
    assert len(set(INTERNALS.findall(inside))) > 5


@pytest.mark.filterwarnings("error")
def test_a_model_is_made_without_a_warning():
    model = make_model(n_layers=1, d_model=4, n_ctx=4, d_head=2, d_vocab=5, act_fn="gelu", seed=0)
    assert model.cfg.n_heads == 2


def test_the_version_is_the_one_that_is_installed():
    assert version("transformer_lens").split(".")[0] == "3"


@pytest.mark.process
@pytest.mark.parametrize("setting", ["error", "default"])
def test_the_librarys_deprecation_does_not_reach_the_command_line(setting):
    command = [sys.executable, "-m", "rlhf_lab", "sample", "reel-nano", "--n", "1"]
    environment = os.environ | {"PYTHONWARNINGS": setting}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "HookedTransformer is deprecated" not in done.stdout + done.stderr
