"""Unusual options, models, data and files of commands: rejected in one message, or right."""

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_lab import RLHFTrainer
from rlhf_lab.course import CheckNotPassed, check
from rlhf_lab.errors import LabError
from rlhf_lab.models import load_model
from rlhf_lab.rewards import SentimentReward
from rlhf_lab.views import curves, heatmap, sparkline, tokens_html
from tests.doors.door import TRAIN, Ending, accepted, refused, refuses, run, settings, untouched

pytestmark = pytest.mark.usefixtures("no_type_checks")

QUICK = ["--steps", "2", "--samples", "0", "--no-show-progress"]
FIT = ["--steps", "2", "--no-show-progress"]
ESCAPE = "\x1b]0;owned\x07"


def answers_or_warns(ending: Ending) -> None:
    """Check that a command was rejected, or succeeded with a warning."""
    assert ending.raised is None, repr(ending.raised)
    lines = [line for line in ending.err.splitlines() if line.startswith("rlhf_lab")]
    assert ending.status in (0, 2) and lines, (ending.status, ending.err)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Replace the contents of a JSON file by `change(contents)`."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely trained reward model, to be copied."""
    out = tmp_path_factory.mktemp("judge") / "judge"
    accepted(["train-reward", "--pairs", "reel", "--n-pairs", 40, "--out", out, *FIT])
    return out


@pytest.fixture(scope="module")
def bundled() -> Path:
    import rlhf_lab

    return Path(rlhf_lab.__file__).parent / "organism" / "weights"


@pytest.fixture
def classifier(bundled: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the bundled classifier with other class names; class 1 is positive."""

    def copy(*names: str, **changes: Any) -> Path:
        place = tmp_path / "classifier"
        shutil.copytree(bundled / "reel-sentiment", place)
        labels = {"id2label": {str(i): name for i, name in enumerate(names)}}
        labels["label2id"] = {name: i for i, name in enumerate(names)}
        edit(place / "config.json", lambda config: config | labels | changes)
        return place

    return copy


# Options


def test_settings_reject_numpy_scalars() -> None:
    numbers = {"kl_coef": np.float32(0.25), "seed": np.int64(7), "stop_at_eos": np.bool_(True)}
    for field, number in numbers.items():
        refuses(lambda field=field, number=number: settings(**{field: number}), field, "must be")


REJECTED = {
    "nothing to count": ([*TRAIN, "--reward-fn", "count:"], ["count:"]),
    "nothing to count, to score": (["score", "x", "--reward-fn", "count:"], ["count:"]),
    "stop tokens of commas": ([*TRAIN, "--stop-tokens", ",,"], ["stop_tokens"]),
    "a stop token of two": ([*TRAIN, "--stop-tokens", "so good"], ["stop_tokens", "so good"]),
    "device meta": ([*TRAIN, "--device", "meta"], ["device"]),
    "second CPU": ([*TRAIN, "--device", "cpu:7"], ["device"]),
    "no out": ([*TRAIN, "--out", ""], ["out"]),
    "link to nowhere": ([*TRAIN, "--out", "link"], ["link"]),
    "too long": ([*TRAIN, "--min-response-length", 9], ["min_response_length", "8"]),
    "overlong buffer": ([*TRAIN, "--overlong-buffer", 99], ["overlong_buffer", "8"]),
    "classifier as policy": ([*TRAIN, "--base-model", "reel-sentiment"], ["reel-sentiment"]),
    "policy as classifier": ([*TRAIN, "--reward-model", "reel-nano"], ["reel-nano"]),
    "run as policy": ([*TRAIN, "--base-model", "RUN"], ["RUN", "export"]),
    "run as reward": ([*TRAIN, "--reward-fn", "learned", "--reward-model", "RUN"], ["RUN"]),
    "run as classifier": ([*TRAIN, "--reward-model", "RUN"], ["RUN"]),
    "run's file resumed": (["resume", "RUN/run.json"], ["run.json"]),
    "address as model": (["sample", "https://huggingface.co/gpt2"], ["https"]),
    "empty dataset": ([*TRAIN, "--prompts", "hub:"], ["hub:"]),
    "dataset of colons": (["sft", "--texts", "hub:::", "--out", "made", *QUICK], ["hub:"]),
}


@pytest.mark.parametrize("name", REJECTED)
def test_commands_reject_meaningless_options(here: Path, name: str) -> None:
    arguments, words = REJECTED[name]
    Path("link").symlink_to("nowhere/at/all")
    with untouched(here):
        refused(arguments, *words)


def test_matrix_named_twice_has_one_adapter(here: Path) -> None:
    for out, targets in {"once": "W_Q", "twice": "W_Q,W_Q"}.items():
        accepted([*TRAIN, "--lora-rank", 2, "--lora-targets", targets, "--out", out])
    found = (load_file(f"{out}/checkpoints/last.safetensors") for out in ("once", "twice"))
    assert same(*found)


def test_path_selects_a_directory_with_a_bundled_name(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "reel-nano")
    ending = accepted(["sample", "./reel-nano", "--prompt", "w1 w2", "-n", 1, "--gen-len", 4])
    assert re.search(r"\bw1 w2\b", ending.out)


def test_sample_rejects_a_reward_model(here: Path, judge: Path) -> None:
    refused(["sample", judge, "-n", 1], "reward model")


# Runs that change while a trainer is away


def test_resume_warns_about_a_changed_reward_model(here: Path, judge: Path) -> None:
    shutil.copytree(judge, "judge")
    args = settings(reward_fn="learned", reward_model="judge", total_phases=3)
    trainer = RLHFTrainer(args, out="made")
    trainer.run_phase()
    del trainer
    head = load_file("judge/reward_head.safetensors")
    head["head.weight"] *= -1
    save_file(head, "judge/reward_head.safetensors")
    ending = run(["resume", "made"])
    answers_or_warns(ending)
    assert "reward_model='judge'" in ending.err


def test_second_trainer_of_a_new_run_is_rejected(here: Path) -> None:
    first = RLHFTrainer(settings(), out="made")
    second = RLHFTrainer(settings(seed=2), out="made")
    first.run_phase()
    refuses(second.run_phase, "made")
    first.run_phase()
    assert json.loads(Path("made/run.json").read_text())["args"]["seed"] == 1
    assert len(lines(Path("made/metrics.jsonl"))) == 2


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_run_deleted_or_moved_during_training_raises(here: Path, how: str) -> None:
    trainer = RLHFTrainer(settings(total_phases=4), out="made")
    trainer.run_phase()
    trainer.run_phase()
    if how == "deleted":
        while Path("made").exists():  # the newest checkpoint may still be on its way
            shutil.rmtree("made", ignore_errors=True)
    else:
        Path("made").rename("moved")
    refuses(trainer.train, "made")


# Model directories and labels


def test_missing_shard_is_rejected(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "model")
    names = load_file("model/model.safetensors")
    Path("model/model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../../elsewhere.safetensors")}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    refused(["sample", "model", "--prompt", "w1", "-n", 1], "model")


def test_half_precision_weights_load_as_float32(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "model")
    halves = {k: v.half() for k, v in load_file("model/model.safetensors").items()}
    save_file(halves, "model/model.safetensors", metadata={"format": "pt"})
    edit(Path("model/config.json"), lambda config: config | {"dtype": "float16"})
    assert {p.dtype for p in load_model("model").parameters()} == {torch.float32}


def test_contradicting_labels_are_rejected(classifier: Callable[..., Path], here: Path) -> None:
    place = classifier("NEGATIVE", "POSITIVE", label2id={"POSITIVE": 0, "NEGATIVE": 1})
    refuses(lambda: SentimentReward(str(place)), "label2id")


JUDGES = {
    "std 0": {"std": 0.0},
    "std below 0": {"std": -1.0},
    "a mean for every word": {"mean": [0.0, 1.0]},
    "mean nan": {"mean": math.nan},
}


@pytest.mark.parametrize("name", JUDGES)
def test_edited_reward_statistics_are_rejected(here: Path, judge: Path, name: str) -> None:
    shutil.copytree(judge, "judge")
    head = load_file("judge/reward_head.safetensors")
    assert set(JUDGES[name]) <= set(head), head
    changed = {key: torch.tensor(value) for key, value in JUDGES[name].items()}
    save_file(head | changed, "judge/reward_head.safetensors")
    command = ["score", "this movie", "--reward-fn", "learned", "--reward-model", "judge"]
    refused(command, "reward_head.safetensors")


@pytest.mark.parametrize("how", ["gone", "wider", "nan"])
def test_unfit_reward_head_is_rejected(here: Path, judge: Path, how: str) -> None:
    shutil.copytree(judge, "judge")
    path = Path("judge/reward_head.safetensors")
    head = load_file(path)
    path.unlink()
    if how == "wider":
        save_file({k: torch.zeros(*v.shape, 2) for k, v in head.items()}, path)
    if how == "nan":
        save_file({k: torch.full_like(v, math.nan) for k, v in head.items()}, path)
    command = ["score", "this movie", "--reward-fn", "learned", "--reward-model", "judge"]
    refused(command, "judge")


# Data


@pytest.mark.parametrize("kind", ["txt", "csv", "jsonl"])
def test_windows_files_are_read(here: Path, kind: str) -> None:
    rows = {"txt": "this movie", "csv": "prompt\r\nthis movie", "jsonl": '{"prompt": "this movie"}'}
    Path(f"p.{kind}").write_bytes(b"\xef\xbb\xbf" + rows[kind].encode() + b"\r\n")
    accepted([*TRAIN, "--prompts", f"p.{kind}", "--out", "made"])
    assert all(line["text"].startswith("this movie") for line in lines(Path("made/samples.jsonl")))


FILES = {
    "semicolons": ("p.csv", "prompt;label\nthis movie;good\n", ["p.csv", "prompt"]),
    "a column twice": ("p.csv", "prompt,prompt\nthis movie,this\n", ["p.csv", "prompt"]),
    "a row too short": ("p.csv", "label,prompt\nx,this movie\ny\n", ["p.csv", "3"]),
    "a row too long": ("p.csv", "prompt\nthis movie,was so good\n", ["p.csv", "2"]),
    "an empty prompt": ("p.jsonl", '{"prompt": "this movie"}\n{"prompt": ""}\n', ["p.jsonl", "2"]),
    "a prompt of blanks": ("p.jsonl", '{"prompt": "   "}\n', ["p.jsonl", "1"]),
}


@pytest.mark.parametrize("name", FILES)
def test_ambiguous_prompt_files_are_rejected(here: Path, name: str) -> None:
    file, text, words = FILES[name]
    Path(file).write_text(text)
    refused([*TRAIN, "--prompts", file, "--no-prepend-bos"], *words)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.csv"])
def test_pipe_as_data_is_rejected(here: Path, name: str) -> None:
    os.mkfifo(name)
    arguments = {
        "p.txt": [*TRAIN, "--prompts", name],
        "p.jsonl": ["train-reward", "--pairs", name, "--out", "made", *FIT],
        "p.csv": ["sft", "--texts", name, "--out", "made", *QUICK],
    }
    refused(arguments[name], name)


PAIRS = {
    "margin nan": ([{"margin": math.nan}], ["--margin", 1], ["margin"]),
    "a margin without end": ([{"margin": math.inf}], ["--margin", 1], ["margin"]),
    "a margin of text": ([{"margin": "large"}], ["--margin", 1], ["margin"]),
    "texts that are equal": ([{"rejected": "this movie was good"}], [], ["chosen", "rejected"]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_without_preference_are_rejected(here: Path, name: str) -> None:
    changes, options, words = PAIRS[name]
    pair = {"chosen": "this movie was good", "rejected": "this movie was bad", "margin": 1.0}
    rows = [pair | change for change in changes * 20]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    refused(["train-reward", "--pairs", "pairs.jsonl", "--out", "made", *FIT, *options], *words)


# Pages and terminals


ECHOED = {
    "a prompt": ["sample", "RUN", "--prompt", f"this {ESCAPE}"],
    "a path": ["resume", f"no{ESCAPE}"],
    "a path of two lines": ["report", "no\nrlhf_lab: all is well."],
    "a checkpoint": ["sample", "RUN", "--checkpoint", f"{ESCAPE}best"],
    "a text that turns": ["sample", "RUN", "--prompt", "this \u202egnihtemos"],
    "a stop token": [*TRAIN, "--stop-tokens", ESCAPE],
}


@pytest.mark.parametrize("name", ECHOED)
def test_messages_escape_control_characters(here: Path, name: str) -> None:
    ending = refused(ECHOED[name])
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", ending.err), ascii(ending.err)


NASTY = '"><script>alert(1)</script><p onmouseover="x'


def test_pictures_escape_names_and_titles() -> None:
    pages = [
        str(tokens_html(["good"], [1.0], name=NASTY)),
        curves({NASTY: ([0, 1], [1.0, 2.0])}, NASTY, NASTY, NASTY).svg,
        heatmap([[1.0]], [NASTY], [NASTY], NASTY).svg,
    ]
    assert not [page for page in pages if "<script" in page or '<p onmouseover="' in page]


def test_curves_ignore_nan_and_inf() -> None:
    svg = curves({"a": ([0, 1, 2], [math.nan, math.inf, 1.0])}, "title").svg
    coordinates = re.findall(r'(?:points|d|x|y|cx|cy)="([^"]*)"', svg)
    assert not [found for found in coordinates if "nan" in found or "inf" in found]
    assert sparkline([]) == "" and sparkline([math.nan]) in ("", " ")


def test_report_of_a_run_without_phases(here: Path) -> None:
    trainer = RLHFTrainer(settings(), out="made")
    trainer.start()
    del trainer
    accepted(["report", "made"])
    assert "<html" in Path("made/report.html").read_text()


# Learner code


def returning(value: Any) -> Callable[..., Any]:
    def masked_mean(*arguments: Any, **options: Any) -> Any:
        return value

    return masked_mean


@pytest.mark.parametrize("thing", [None, "masked_mean", 3, print], ids=repr)
def test_check_rejects_other_objects(thing: Any) -> None:
    with pytest.raises(ValueError, match="exercise"):
        check(thing)


# The environment


def test_check_works_when_home_is_a_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("home").write_text("")
    monkeypatch.setenv("HOME", str(here / "home"))
    with contextlib.suppress(CheckNotPassed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(returning(None))
    assert "masked_mean" in capsys.readouterr().out
    ending = run(["progress"])
    assert ending.raised is None and ending.status in (0, 2)


def test_damaged_progress_file_is_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = here / ".local" / "share" / "rlhf_lab" / "progress.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"masked_mean": {"checks": 12, "sta')
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    run(["progress"])
    with contextlib.suppress(CheckNotPassed, LabError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(returning(None))
    kept = [path.read_text() for path in place.parent.iterdir()]
    assert any('{"masked_mean": {"checks": 12, "sta' in text for text in kept)
