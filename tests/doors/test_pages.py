"""Texts that are markup, code or control characters: shown as they are, and nothing else."""

import json
import re
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_lab.console import UNSEEN, visible
from rlhf_lab.views import sample_table
from rlhf_lab.views.html import POLICY, table
from rlhf_lab.views.tokens import color_key, tokens_html, tokens_text
from tests.doors.door import accepted, run
from tests.tiny_models import N_CTX, randomize, save, tiny_gpt2

pytestmark = pytest.mark.usefixtures("no_type_checks")
HOSTILE = {
    "script": "<script>alert(1)</script>",
    "script, half": "<script src=//evil.example/x",
    "image": '<img src="https://evil.example/x.png" onerror="alert(1)">',
    "end of a tag": "</td></tr></table></body></html><h1>mine</h1>",
    "attribute": '" onmouseover="alert(1)" x="',
    "attribute, single": "' onload='alert(1)'",
    "entity": "&lt;script&gt;&#60;b&#62;&amp;",
    "style": "</style><style>body{background:url(https://evil.example)}",
    "comment": "--><!-- <![CDATA[ <!doctype x>",
    "link": '<a href="javascript:alert(1)">here</a><base href="//evil.example/">',
    "refresh": '<meta http-equiv="refresh" content="0;url=//evil.example">',
    "rich": "[bold red]x[/bold red] [/] [link=https://evil.example]y[/link] :smile:",
    "colors": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x9b1m",
    "back": "good\b\b\b\bbad\rover\x7f",
    "direction": "abc\u202edcba\u2066x\u2069\u200f",
    "NUL": "a\0b",
    "breaks": "a\nb\x0bc\x0cd\x85e\u2028f",
    "a long word": "w" * 20_000,
    "format": "%s %(x)s {0} {x!r} ${HOME} $(id) `id`",
}
TAGS = set("html head meta title style body h1 h2 h3 p table tr th td tbody thead div span".split())
TAGS |= set("figure figcaption img code ul li section details summary br b small".split())


class Page(HTMLParser):
    """Checks each tag of a page; collects what it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attributes:
            assert not name.startswith("on") and name != "href", (tag, name)
            assert name != "src" or value.startswith("data:image/svg+xml;base64,"), value
            assert name != "http-equiv" or value == "Content-Security-Policy"

    def handle_data(self, data: str) -> None:
        self.shown += data


def in_samples(here: Path, text: str) -> None:
    rows = [json.loads(line) for line in (here / "RUN" / "samples.jsonl").read_text().splitlines()]
    rows[0]["text"] = rows[-1]["text"] = text
    (here / "RUN" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def noted(**changes: Callable[[str], object]) -> Callable[[Path, str], None]:
    """Puts a text into entries of run.json."""

    def put(here: Path, text: str) -> None:
        path = here / "RUN" / "run.json"
        info = json.loads(path.read_text())
        info |= {name: make(text) for name, make in changes.items() if name != "args"}
        if "args" in changes:
            info["args"] |= changes["args"](text)
        path.write_text(json.dumps(info))

    return put


def returned(here: Path, text: str) -> None:
    (here / "RUN" / "returned").mkdir(exist_ok=True)
    record = {"phase": 1, "event": "after_step", text: text, "n": 1.5}
    line = json.dumps(record) + "\n"
    (here / "RUN" / "returned" / "mine.jsonl").write_text(line * 2)


SURFACES = {
    "samples": in_samples,
    "settings": noted(
        args=lambda text: {"prefix": text, "base_model": text, "wandb_project": text}
    ),
    "diagnostics": noted(diagnostics=lambda text: {"dead": {"phase": 1, "text": text}}),
    "class": noted(rewarded_class=lambda text: {"index": 1, "label": text}),
    "versions": noted(versions=lambda text: {text: text}, device=str, status=str),
    "returned": returned,
}


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without curves, which hold no text of the user and take most of the time."""
    monkeypatch.setattr("rlhf_lab.views.report._curves", lambda run: "")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", HOSTILE)
def test_the_report_shows_a_text_as_it_is(here: Path, name: str, surface: str) -> None:
    text = HOSTILE[name]
    SURFACES[surface](here, text)
    accepted(["report", "RUN"])
    page = (here / "RUN" / "report.html").read_text(encoding="utf-8")
    assert not UNSEEN.search(page) and escape(POLICY) in page.replace("'", "&#x27;")
    shown = Page(page).shown
    wanted = json.dumps(text)[1:-1] if surface == "settings" else visible(text)
    assert wanted in shown


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", sorted(set(HOSTILE) - {"NUL", "a long word"}))
def test_the_report_shows_the_name_of_a_run_as_it_is(here: Path, name: str) -> None:
    called = HOSTILE[name].replace("/", "\u2215")
    (here / "RUN").rename(here / called)
    ending = accepted(["report", called])
    page = (here / called / "report.html").read_text(encoding="utf-8")
    assert not UNSEEN.search(page) and visible(called) in Page(page).shown
    assert visible(called) in ending.out and not UNSEEN.search(ending.out)


@pytest.mark.parametrize("name", HOSTILE)
def test_tokens_are_shown_as_they_are(name: str) -> None:
    text = HOSTILE[name]
    fragment = tokens_html([text, " fine"], [0.5, -1.0], name=text)._repr_html_()
    fragment += color_key(text, 1.0)._repr_html_()
    fragment += visible(table([text], [[text]]))
    assert not UNSEEN.search(fragment)
    shown = Page(fragment).shown
    assert shown.count(visible(text)) >= 3 or name == "breaks"
    console = Console(record=True, width=30_000, force_terminal=True, file=open("/dev/null", "w"))
    console.print(tokens_text([text, " fine"], [0.5, -1.0]))
    console.print(sample_table([text, "x"], [0.5, -1.0], prompt=text[:3]))
    assert not UNSEEN.search(console.export_text().replace("\n", ""))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_score_shows_its_text_on_one_line(name: str) -> None:
    text = HOSTILE[name]
    out = accepted(["score", text]).out
    assert not UNSEEN.search(out)
    assert out.partition("\t")[2].rstrip("\n") == visible(text)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_prompt_that_cannot_be_continued_is_named_as_it_is(here: Path, name: str) -> None:
    ending = run(["sample", "RUN", "--prompt", HOSTILE[name]])
    assert ending.raised is None and ending.status == 2
    assert not UNSEEN.search(ending.err) and ending.err.count("\n") == 1


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every word is hostile."""
    words = ["<|endoftext|>", *HOSTILE.values()]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("|||", "removed")
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), words[0])
    model = tiny_gpt2(vocab_size=len(words))
    randomize(model, 5)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=N_CTX, **special)
    return save(model, whole, tmp_path_factory.mktemp("speaker") / "model")


@pytest.mark.parametrize("command", ["sample", "train"])
def test_what_a_model_writes_is_shown_as_it_is(
    speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if command == "sample":
        out = accepted(["sample", speaker, "-n", "20", "--gen-len", "6"]).out
    else:
        small = "--total-phases 1 --batch-size 16 --num-minibatches 1 --warmup-steps 0 --gen-len 6"
        model = ["--base-model", speaker, "--reward-fn", "zero", "--prefix", HOSTILE["rich"]]
        out = accepted(["train", *small.split(), *model, "--out", "made"]).out
        out += accepted(["sample", "made", "-n", "20"]).out
        accepted(["report", "made"])
        page = Path("made", "report.html").read_text(encoding="utf-8")
        assert not UNSEEN.search(page)
        Page(page)
    assert not UNSEEN.search(out) and re.search("script|onload|evil|red|HOME", out)


@pytest.mark.process
def test_a_process_writes_no_control_character_to_its_terminal(here: Path, warm_python) -> None:
    in_samples(here, HOSTILE["colors"])
    for command in (["score", HOSTILE["colors"]], ["sample", "RUN", "--prompt", HOSTILE["colors"]]):
        done = warm_python.run(["-m", "rlhf_lab", *command], cwd=here)
        assert not UNSEEN.search(done.stdout + done.stderr) and "Traceback" not in done.stderr
