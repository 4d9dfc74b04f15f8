"""Where the package is not installed: a lesson's first cell, and the wheel in a new directory."""

import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from tools.course.builder import FIRST_CELL

ROOT = Path(__file__).parents[2]
SOURCES = ("rlhf_lab", "notebooks", "solutions", "setup.py", "pyproject.toml", "README.md")
SOURCES += ("LICENSE", "requirements.txt")
SMALL = ("--total-phases", "1", "--batch-size", "4", "--gen-len", "4", "--warmup-steps", "0")
TRAINED = """
import torch
from rlhf_lab import RLHFArgs, RLHFTrainer, __file__
small = {"preset": "reel", "total_phases": 1, "batch_size": 4, "gen_len": 4, "warmup_steps": 0}
(report,) = RLHFTrainer(RLHFArgs(**small, num_minibatches=1))
print(report.phase, torch.get_num_threads(), __file__)
"""
RIGHT = """x = at_least_float32(x)
    counted = zero_masked(torch.ones_like(x), mask).sum(dim)
    count = torch.as_tensor(counted if denominator is None else denominator)
    return zero_masked(x, mask).sum(dim) / count.masked_fill(count == 0, 1)"""

pytestmark = [pytest.mark.kernel, pytest.mark.nightly]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel of this checkout, built apart from it."""
    apart, place = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, apart / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, place, "--no-build-isolation", apart], check=True)
    return place


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that has all that the package needs, and not the package; and its kernel."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(site.getsitepackages()[0]).iterdir():
        if not entry.name.startswith(("rlhf_lab", "__editable__")):
            (packages / entry.name).symlink_to(entry)
    venv.create(tmp_path / "env", symlinks=True)
    (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (own / "all.pth").write_text(f"{packages}\n")
    kernel = tmp_path / "kernels" / "bare" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = f'["{tmp_path}/env/bin/python", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    kernel.write_text(f'{{"argv": {argv}, "display_name": "bare"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "env"


def run(notebook: NotebookNode, place: Path) -> list[str]:
    """Run a notebook in the bare environment's kernel; returns what each code cell printed."""
    place.mkdir(exist_ok=True)
    where = {"metadata": {"path": place}}
    NotebookClient(notebook, kernel_name="bare", timeout=300, resources=where).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.get("text", "") for output in of_cell) for of_cell in outputs]


def of_cells(*sources: str) -> NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


def test_first_cell_takes_a_clone_and_keeps_threads(tmp_path, bare, monkeypatch):
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "rlhf_lab").symlink_to(ROOT / "rlhf_lab")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    _, printed = run(of_cells(FIRST_CELL, TRAINED), clone / "notebooks")
    phase, threads, file = printed.split()[-3:]
    assert (phase, threads) == ("0", "2")
    assert Path(file).is_relative_to(clone)


def test_first_cell_takes_the_wheel_that_its_error_names(tmp_path, bare, wheels):
    with pytest.raises(CellExecutionError) as raised:
        run(of_cells(FIRST_CELL, TRAINED), tmp_path / "lessons")
    assert raised.value.ename == "ModuleNotFoundError"
    clone, wheel = re.findall("`pip install (.*?)`", raised.value.evalue)
    assert clone == "-e ."
    pip = [bare / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, wheels / Path(wheel).name], check=True)
    _, printed = run(of_cells(FIRST_CELL, TRAINED), tmp_path / "lessons")
    phase, threads, file = printed.split()[-3:]
    assert (phase, threads) == ("0", "1")
    assert Path(file).is_relative_to(bare)


def test_the_wheel_in_an_empty_directory_trains_reports_and_checks_an_exercise(
    tmp_path, bare, wheels
):
    place = tmp_path / "empty"
    place.mkdir()

    def command(*words: object) -> None:
        done = subprocess.run(words, cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    command(bare / "bin" / "python", "-m", "pip", "install", *wheels.iterdir())
    rlhf_lab = bare / "bin" / "rlhf_lab"
    command(rlhf_lab, "train", "--preset", "reel", *SMALL, "--num-minibatches", "1", "--out", "run")
    command(rlhf_lab, "report", "run", "--out", "run.html")
    assert (place / "run.html").stat().st_size > 10_000
    command(rlhf_lab, "course", "copy", "lessons")
    lesson = nbformat.read(place / "lessons" / "00_start.ipynb", as_version=4)
    checked = next(i for i, cell in enumerate(lesson.cells) if cell.source.startswith("check("))
    stub = lesson.cells[checked - 1]
    assert stub.source.endswith("raise NotImplementedError")
    stub.source = stub.source.replace("raise NotImplementedError", RIGHT)
    lesson.cells = lesson.cells[: checked + 1]
    run(lesson, place / "lessons")
    shown = "".join(str(output) for output in lesson.cells[checked].outputs)
    assert "✓ masked_mean" in shown, shown
