"""Texts and names with markup, code or control characters: escaped, never executed."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_lab.console import UNSEEN, visible
from rlhf_lab.views import sample_table
from rlhf_lab.views.pictures import Table
from rlhf_lab.views.tokens import color_key, tokens_html, tokens_text
from tests.bad_input.command_outcome import TRAIN, accepted, rejected, untouched
from tests.views.page_blocks import Page, read_blocks

pytestmark = pytest.mark.usefixtures("no_type_checks")
HOSTILE = {
    "script": "<script>alert(1)</script>",
    "image": '<img src="https://evil.example/x.png" onerror="alert(1)">',
    "end of a tag": "</td></tr></table></body></html><h1>mine</h1>",
    "attribute": '" onmouseover="alert(1)" x=\'y',
    "style": "</style><style>body{background:url(https://evil.example)}",
    "rich": "[bold red]x[/bold red] [/] [link=https://evil.example]y[/link] :smile:",
    "colors": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x9b1m",
    "back": "good\b\b\b\bbad\rover\x7f\0",
    "direction": "abc\u202edcba\u2066x\u2069\u200f",
    "breaks": "a\nb\x0bc\x0cd\x85e\u2028f",
    "format": "%s %(x)s {0} {x!r} ${HOME} $(id) `id`",
}
NAMES = {
    "line break": "new\nline",
    "escape": "a\x1b[31mb\u202e",
    "shell": "$HOME ~",
    "HTML": "<b>&amp;<script>",
    "255 bytes": "x" * 240,
}


def in_samples(text: str) -> None:
    rows = [json.loads(line) for line in Path("RUN/samples.jsonl").read_text().splitlines()]
    rows[0]["text"] = rows[-1]["text"] = text
    Path("RUN/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_info(change: Callable[[str], dict[str, object]]) -> Callable[[str], None]:
    """Write a text into entries of run.json."""

    def put(text: str) -> None:
        info = json.loads(Path("RUN/run.json").read_text())
        changes = change(text)
        changes |= {"args": info["args"] | changes.get("args", {})}
        Path("RUN/run.json").write_text(json.dumps(info | changes))

    return put


def returned(text: str) -> None:
    Path("RUN/returned").mkdir(exist_ok=True)
    record = {"phase": 1, "event": "after_step", text: text, "n": 1.5}
    Path("RUN/returned/mine.jsonl").write_text(f"{json.dumps(record)}\n" * 2)


SURFACES = {
    "samples": in_samples,
    "settings": in_info(lambda x: {"args": {"prefix": x, "base_model": x, "wandb_project": x}}),
    "diagnostics": in_info(lambda x: {"diagnostics": {"dead": {"phase": 1, "text": x}}}),
    "class": in_info(lambda x: {"sources": {"rewarded_class": {"label": x}}}),
    "versions": in_info(lambda x: {"versions": {x: x}, "device": x, "status": x}),
    "returned": returned,
}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", HOSTILE)
def test_report_escapes_text(here, monkeypatch, name: str, surface: str) -> None:
    # without the curves, which have no text of the user
    monkeypatch.setattr("rlhf_lab.views.report._curves", lambda runs: {"curves": []})
    text = HOSTILE[name]
    SURFACES[surface](text)
    accepted(["report", "RUN"])
    page = Path("RUN/report.html").read_text(encoding="utf-8")
    blocks = read_blocks(page)
    assert not UNSEEN.search(page + "".join(map(str, blocks.values())))
    assert len(re.findall("<script>", page)) == 1 == len(re.findall("<style", page))
    expected = json.dumps(text)[1:-1] if surface == "settings" else visible(text)
    texts = [row[-1] for row in blocks["s"]]
    assert expected in (texts if surface == "samples" else Page(page).text)


@pytest.mark.parametrize("name", HOSTILE)
def test_tokens_and_commands_show_text_as_it_is(here, name: str) -> None:
    text = HOSTILE[name]
    fragment = tokens_html([text, " fine"], [0.5, -1.0], name=text)._repr_html_()
    fragment += color_key(text, 1.0)._repr_html_() + visible(Table([text], [[text]]).fragment)
    assert not UNSEEN.search(fragment)
    assert Page(fragment).text.count(visible(text)) >= 3 or name == "breaks"
    console = Console(record=True, width=30_000, force_terminal=True, file=open("/dev/null", "w"))
    console.print(tokens_text([text, " fine"], [0.5, -1.0]))
    console.print(sample_table([text, "x"], [0.5, -1.0], prompt=text[:3]))
    assert not UNSEEN.search(console.export_text().replace("\n", ""))
    out = accepted(["score", text]).out
    assert out.partition("\t")[2].rstrip("\n") == visible(text) and not UNSEEN.search(out)
    err = rejected(["sample", "RUN", "--prompt", text]).err
    assert not UNSEEN.search(err) and err.count("\n") == 1


@pytest.mark.parametrize("kind", NAMES)
def test_run_with_odd_name_is_written_and_named(here: Path, kind: str) -> None:
    name = NAMES[kind]
    outcome = accepted([*TRAIN, f"--out={name}"])
    path = f"\nwritten to {visible(name)}\n".expandtabs()  # as a terminal shows it
    assert outcome.err == "" and path in outcome.out and (here / name / "run.json").is_file()
    with untouched(here):
        message = visible(name).replace("\n", r"\n")
        rejected([*TRAIN, f"--out={name}"], f"{message} already holds a run")
    out = accepted(["report", f"./{name}"]).out
    assert out == f"written: {visible(name)}/report.html\n".expandtabs()
    assert f"<h1>{html.escape(visible(name))}</h1>" in (here / name / "report.html").read_text()


def test_model_with_odd_name_is_exported(here: Path) -> None:
    name = NAMES["HTML"] + NAMES["line break"]
    assert f"written to {visible(name)};" in accepted(["export", "RUN", f"./{name}"]).out
    rejected([*TRAIN, "--out=a\udcffb"], "not UTF-8", "Choose another --out")
