"""Names that a file system takes and that a terminal, markup, HTML or a shell would not."""

import html
import shutil
from pathlib import Path

import pytest

from rlhf_lab.console import visible
from tests.doors.door import TRAIN, accepted, refused, untouched

NAMES = {
    "a tag within": "exp[red]v2[bold]",
    "line break": "new\nline",
    "blank": "my run",
    "dashes": "--out",
    "Japanese": "日本語",
    "escape": "a\x1b[31mb",
    "direction": "a\u202egnp",
    "dollar": "$HOME",
    "tilde": "~",
    "HTML": "<b>&amp;<script>",
    "255 bytes": "x" * 240,
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("kind", NAMES)
def test_a_run_of_an_odd_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = NAMES[kind]
    done = accepted([*TRAIN, f"--out={name}"])
    written = f"\nwritten to {visible(name)}\n".expandtabs()  # as a terminal has it
    assert done.err == "" and written in done.out
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "run.json").is_file()
    said = accepted(["report", f"./{name}"]).out
    assert said == f"written: {visible(name)}/report.html\n".expandtabs()
    page = (tmp_path / name / "report.html").read_text()
    assert f"<h1>{html.escape(visible(name))}</h1>" in page


@pytest.mark.parametrize("kind", NAMES)
def test_a_sentence_about_an_odd_name(here: Path, kind: str) -> None:
    shutil.copytree(here / "RUN", here / NAMES[kind])
    shown = visible(NAMES[kind]).replace("\n", r"\n")
    with untouched(here):
        refused([*TRAIN, f"--out={NAMES[kind]}"], f"{shown} already holds a run")


def test_a_name_that_safetensors_cannot_open(here: Path) -> None:
    with untouched(here):
        refused([*TRAIN, "--out=a\udcffb"], "not UTF-8", "Choose another --out")


@pytest.mark.parametrize("kind", ["a tag within", "line break", "HTML"])
def test_a_model_of_an_odd_name(here: Path, kind: str) -> None:
    name = NAMES[kind]
    said = accepted(["export", "RUN", f"./{name}"]).out
    assert f"written to {visible(name)};" in said
    assert len(accepted(["sample", f"./{name}", "-n", "2", "--gen-len", "4"]).out.splitlines()) == 2
