"""Names and texts of others on a terminal: no markup, no escape sequence, no turned line."""

import io
import json
import sys

import pytest
from rich.console import Console

from rlhf_lab.__main__ import main
from rlhf_lab.console import visible
from rlhf_lab.training import RunDir
from rlhf_lab.views import sample_table
from rlhf_lab.views.html import Html, page

TINY = "train --total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
HOSTILE = "a\x1b[2J\x1b]0;title\x07\u202eb\x9b1m\r\x7f\u2066c"
WRITTEN_OUT = r"a\x1b[2J\x1b]0;title\x07\u202eb\x9b1m\r\x7f\u2066c"


def holds_hidden(text: str) -> bool:
    """Whether a control character or one that turns a line is there."""
    hidden = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    return any(
        c in hidden or (c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)) for c in text
    )


def test_hidden_characters_are_written_out_and_all_others_stay():
    assert visible(HOSTILE) == WRITTEN_OUT
    for code in range(0x3000):
        shown = visible(chr(code))
        assert not holds_hidden(shown)
        assert (shown == chr(code)) == (not holds_hidden(chr(code)))
    assert visible("é 漢字 \U0001f600 [b]\tc\n") == "é 漢字 \U0001f600 [b]\tc\n"


def test_a_score_shows_the_escapes_of_a_text(capsys):
    assert main(["score", HOSTILE, "--reward-fn", "zero"]) == 0
    assert capsys.readouterr().out == f"0.0000\t{WRITTEN_OUT}\n"


def test_a_refusal_shows_the_escapes_of_a_name(tmp_path, capsys):
    assert main(["report", f"{tmp_path}/{HOSTILE}"]) == 2
    said = capsys.readouterr().err
    assert not holds_hidden(said) and WRITTEN_OUT in said


def test_a_table_of_samples_shows_the_escapes(tmp_path):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(sample_table([HOSTILE + " end"], [1.0], prompt=HOSTILE))
    assert WRITTEN_OUT + " end" in console.file.getvalue()


def test_a_page_shows_the_escapes_of_samples_and_forbids_what_it_does_not_need(tmp_path):
    run = RunDir.create(tmp_path / "run")
    args = {"base_model": HOSTILE, "reward_fn": "<script>", "total_phases": 1}
    run.write_info({"args": args})
    run.append("samples.jsonl", [{"phase": 0, "text": HOSTILE, "reward": 1.0}])
    assert main(["report", str(run.path)]) == 0
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert not holds_hidden(text)
    assert text.count(WRITTEN_OUT) == 2  # in the heading and as a sample
    head = text.split("</head>")[0]
    policy = 'http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:'
    assert policy in head and head.index(policy) < head.index("<style>")
    assert not holds_hidden(page(HOSTILE, HOSTILE))
    assert not holds_hidden(Html(HOSTILE)._repr_html_())


@pytest.mark.parametrize("name", ["a[/red]b", "exp[v2]"])
def test_a_name_with_brackets_is_printed_as_it_is(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY.split(), "--out", name]) == 0
    assert f"written to {name}\n" in capsys.readouterr().out
    out = f"{name} \x1b[2J.html"
    assert main(["report", name, "--out", out]) == 0
    assert capsys.readouterr().out == f"written: {visible(out)}\n"
    model = f"{name} model"
    assert main(["export", name, model]) == 0
    assert f"written to {model};" in capsys.readouterr().out
    assert main([*TINY.split(), "--base-model", model, "--out", "second"]) == 0
    assert f"loading {model} and its reward\n" in capsys.readouterr().out


def test_a_stream_that_cannot_encode_a_name_gets_it_written_out(tmp_path, monkeypatch):
    """As with PYTHONIOENCODING=ascii: the run was done, and ended in a traceback."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    out = tmp_path / "Größe-漢字"
    assert main([*TINY.split(), "--out", str(out)]) == 0
    sys.stdout.flush()
    shown = raw.getvalue().decode("ascii")
    assert r"written to " in shown and r"Gr\xf6\xdfe-\u6f22\u5b57" in shown
    info = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert info["status"] == "finished"


def test_a_real_process_with_an_ascii_terminal_writes_the_name_out(cold_python, tmp_path):
    run = RunDir.create(tmp_path / "Größe")
    run.write_info({"args": {"base_model": "m", "reward_fn": "zero", "total_phases": 1}})
    script = (
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'ascii'); "
        "from rlhf_lab.__main__ import main; sys.exit(main(['report', sys.argv[1]]))"
    )
    found = cold_python(["-c", script, str(run.path)])
    assert found.returncode == 0, found.stderr
    assert r"Gr\xf6\xdfe" in found.stdout and "Traceback" not in found.stderr
