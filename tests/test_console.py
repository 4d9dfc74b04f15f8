"""Escaping of control characters, on terminals, on pages and for limited encodings."""

import io
import json
import sys

from rlhf_lab.__main__ import main
from rlhf_lab.console import visible
from rlhf_lab.training import RunDir
from rlhf_lab.views.html import Html, page

TINY = "train --total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
HOSTILE = "a\x1b[2J\x1b]0;title\x07\u202eb\x9b1m\r\x7f\u2066c"
ESCAPED = r"a\x1b[2J\x1b]0;title\x07\u202eb\x9b1m\r\x7f\u2066c"


def is_hidden(c: str) -> bool:
    """Return True for a control character, or one that changes the writing direction."""
    directions = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return c in directions or (c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160))


def test_visible_escapes_hidden_characters_only():
    assert visible(HOSTILE) == ESCAPED
    for c in map(chr, range(0x3000)):
        assert (visible(c) == c) == (not is_hidden(c)) and not any(map(is_hidden, visible(c)))
    assert visible("é 漢字 \U0001f600 [b]\tc\n") == "é 漢字 \U0001f600 [b]\tc\n"


def test_page_escapes_samples_and_has_a_content_policy(tmp_path):
    run = RunDir.create(tmp_path / "run")
    args = {"base_model": HOSTILE, "reward_fn": "<script>", "total_phases": 1}
    run.write_info({"args": args})
    run.append("samples.jsonl", [{"phase": 0, "text": HOSTILE, "reward": 1.0}])
    assert main(["report", str(run.path)]) == 0
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert text.count(ESCAPED) == 2  # in the heading and as a sample
    head = text.split("</head>")[0]
    policy = 'http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:'
    assert policy in head and head.index(policy) < head.index("<style>")
    for markup in (text, page(HOSTILE, HOSTILE), Html(HOSTILE)._repr_html_()):
        assert not any(map(is_hidden, markup))


def test_stream_gets_escapes_for_characters_it_cannot_encode(tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    out = tmp_path / "Größe-漢字"
    assert main([*TINY.split(), "--out", str(out)]) == 0
    sys.stdout.flush()
    shown = raw.getvalue().decode("ascii")
    assert r"written to " in shown and r"Gr\xf6\xdfe-\u6f22\u5b57" in shown
    info = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert info["status"] == "finished"
