"""What a user might do that nobody had thought of; each case was written before it was tried."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import CheckNotPassed, check
from rlhf_lab.errors import ConfigError, LabError
from rlhf_lab.models import load_model
from rlhf_lab.probes import Check, Probe, Record, Run, Suite, attach
from rlhf_lab.rewards import SentimentReward
from rlhf_lab.views import curves, heatmap, sparkline, tokens_html
from tests.doors.door import Ending, accepted, refused, run, untouched

pytestmark = pytest.mark.usefixtures("no_type_checks")

SMALL = "train --total-phases 1 --batch-size 16 --num-minibatches 2 --warmup-steps 0 --gen-len 8"
TRAIN = SMALL.split()
RAW = ["--no-normalize-reward"]
QUICK = ["--steps", "2", "--samples", "0", "--no-show-progress"]
FIT = ["--steps", "2", "--no-show-progress"]
ESCAPE = "\x1b]0;owned\x07"


def settings(**changes: Any) -> RLHFArgs:
    """Two small phases."""
    small = {"total_phases": 2, "batch_size": 16, "num_minibatches": 2, "gen_len": 8}
    return RLHFArgs(**({"preset": "reel", "warmup_steps": 0} | small | changes))


def refuses(function: Callable[[], Any], *words: str) -> str:
    """Call a function that must raise a `LabError` whose one sentence has these words."""
    with pytest.raises(LabError) as caught:
        function()
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith((".", ")")), sentence
    assert all(word in sentence for word in words), sentence
    return sentence


def told(ending: Ending) -> None:
    """A command that refused, or that did its work and said on standard error what is odd."""
    assert ending.raised is None, repr(ending.raised)
    lines = [line for line in ending.err.splitlines() if line.startswith("rlhf_lab")]
    assert ending.status in (0, 2) and lines, (ending.status, ending.err)


def weights(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Read JSON, and write what `change` makes of it."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def long_texts(texts: list[str]) -> torch.Tensor:
    """A reward that differs from text to text: the share of the letter e."""
    return torch.tensor([text.count("e") / 10 for text in texts])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after two phases with the reward `long_texts` and nothing else."""
    out = tmp_path_factory.mktemp("plain") / "run"
    trainer = RLHFTrainer(settings(), out=out, reward_fn=long_texts)
    trainer.train()
    return weights(trainer)


@pytest.fixture(scope="module")
def idle() -> RLHFTrainer:
    """A trainer that no case lets begin."""
    return RLHFTrainer(settings())


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, hardly trained; to be copied."""
    out = tmp_path_factory.mktemp("judge") / "judge"
    accepted(["train-reward", "--pairs", "reel", "--n-pairs", 40, "--out", out, *FIT])
    return out


@pytest.fixture(scope="module")
def bundled() -> Path:
    import rlhf_lab

    return Path(rlhf_lab.__file__).parent / "organism" / "weights"


@pytest.fixture
def classifier(bundled: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the bundled classifier with other names of its two classes; class 1 is positive."""

    def copy(*names: str, **changes: Any) -> Path:
        place = tmp_path / "classifier"
        shutil.copytree(bundled / "reel-sentiment", place)
        labels = {"id2label": {str(i): name for i, name in enumerate(names)}}
        labels["label2id"] = {name: i for i, name in enumerate(names)}
        edit(place / "config.json", lambda config: config | labels | changes)
        return place

    return copy


# Options


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_no_setting_is_a_number_that_is_none(here: Path, value: str) -> None:
    fields = [
        "temperature",
        "top_p",
        "reward_clip",
        "reward_penalty",
        "gamma",
        "gae_lambda",
        "clip_coef",
        "clip_coef_high",
        "dual_clip",
        "max_log_ratio",
        "vf_coef",
        "vf_clip",
        "ent_coef",
        "target_kl",
        "ratio_threshold",
        "kl_coef",
        "kl_target",
        "base_lr",
        "head_lr",
        "weight_decay",
        "max_grad_norm",
        "final_scale",
        "lora_alpha",
    ]
    for field in fields:
        refuses(lambda field=field: settings(**{field: float(value)}), field)


WRONG_KINDS = {
    "a flag in words": ("stop_at_eos", "no"),
    "a number in words": ("batch_size", "16"),
    "half a phase": ("total_phases", 2.5),
    "a flag as a seed": ("seed", True),
    "no prefix": ("prefix", None),
    "bytes as a prefix": ("prefix", b"this movie"),
    "a list of stop tokens": ("stop_tokens", ["good"]),
    "a preset in capitals": ("preset", "Reel"),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_a_setting_of_another_kind(name: str) -> None:
    field, value = WRONG_KINDS[name]
    refuses(lambda: settings(**{field: value}), field)


def test_settings_from_numpy_are_refused_before_they_cannot_be_written() -> None:
    numbers = {"kl_coef": np.float32(0.25), "seed": np.int64(7), "stop_at_eos": np.bool_(True)}
    for field, number in numbers.items():
        refuses(lambda field=field, number=number: settings(**{field: number}), field, "must be")


REFUSED = {
    "nothing to count": ([*TRAIN, "--reward-fn", "count:"], ["count:"]),
    "nothing to count, to score": (["score", "x", "--reward-fn", "count:"], ["count:"]),
    "stop tokens of commas": ([*TRAIN, "--stop-tokens", ",,"], ["stop_tokens"]),
    "a stop token of two": ([*TRAIN, "--stop-tokens", "so good"], ["stop_tokens", "so good"]),
    "a device of no kind": ([*TRAIN, "--device", "meta"], ["device"]),
    "a device too many": ([*TRAIN, "--device", "cpu:7"], ["device"]),
    "no out": ([*TRAIN, "--out", ""], ["out"]),
    "report to no out": (["report", "RUN", "--out", ""], ["out"]),
    "longer than it writes": ([*TRAIN, "--min-response-length", 9], ["min_response_length", "8"]),
    "overlong beyond its length": ([*TRAIN, "--overlong-buffer", 99], ["overlong_buffer", "8"]),
    "rewards clipped to 0": ([*TRAIN, "--reward-clip", 0], ["reward_clip"]),
    "a gradient of no norm": ([*TRAIN, "--max-grad-norm", 0], ["max_grad_norm"]),
    "a ratio that none is below": ([*TRAIN, "--ratio-threshold", 0.5], ["ratio_threshold"]),
    "a classifier as policy": ([*TRAIN, "--base-model", "reel-sentiment"], ["reel-sentiment"]),
    "a policy as classifier": ([*TRAIN, "--reward-model", "reel-nano"], ["reel-nano"]),
    "a run as policy": ([*TRAIN, "--base-model", "RUN"], ["RUN", "export"]),
    "a run as reward": ([*TRAIN, "--reward-fn", "learned", "--reward-model", "RUN"], ["RUN"]),
    "a run as classifier": ([*TRAIN, "--reward-model", "RUN"], ["RUN"]),
    "a file within a file": ([*TRAIN, "--out", "RUN/run.json/sub"], ["run.json"]),
    "a run's file resumed": (["resume", "RUN/run.json"], ["run.json"]),
    "a checkpoint resumed": (["resume", "RUN/checkpoints/last.safetensors"], ["last.safetensors"]),
    "a run exported over itself": (["export", "RUN", "RUN"], ["RUN"]),
    "no samples": (["sample", "RUN", "-n", 0], ["n"]),
    "an address as model": (["sample", "https://huggingface.co/gpt2"], ["https"]),
    "half a dataset": ([*TRAIN, "--prompts", "hub:"], ["hub:"]),
    "a dataset of colons": (["sft", "--texts", "hub:::", "--out", "made", *QUICK], ["hub:"]),
    "no step": (["sft", "--texts", "reel", "--out", "made", *QUICK, "--steps", 0], ["steps"]),
    "a token to learn from": (
        ["sft", "--texts", "reel", "--out", "made", *QUICK, "--max-tokens", 1],
        ["max_tokens"],
    ),
    "a preference for neither": (
        ["dpo", "--pairs", "reel", "--out", "made", *QUICK, "--beta", 0],
        ["beta"],
    ),
    "more wrong than right": (
        ["dpo", "--pairs", "reel", "--out", "made", *QUICK, "--label-smoothing", 0.7],
        ["label_smoothing"],
    ),
    "all is held out": (
        ["train-reward", "--pairs", "reel", "--out", "made", *FIT, "--held-out", 1],
        ["held_out"],
    ),
    "steps beyond numbers": (
        ["sft", "--texts", "reel", "--out", "made", *QUICK, "--learning-rate", 1e30],
        ["learning_rate"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_makes_no_sense(here: Path, name: str) -> None:
    arguments, words = REFUSED[name]
    with untouched(here):
        refused(arguments, *words)


def test_a_matrix_that_is_named_twice_has_adapters_once(here: Path) -> None:
    for out, targets in {"once": "W_Q", "twice": "W_Q,W_Q"}.items():
        accepted([*TRAIN, "--lora-rank", 2, "--lora-targets", targets, "--out", out])
    found = (load_file(f"{out}/checkpoints/last.safetensors") for out in ("once", "twice"))
    assert same(*found)


def test_more_choices_than_words_are_all_words(here: Path) -> None:
    command = ["sample", "RUN", "-n", 2, "--top-k"]
    assert accepted([*command, 10**9]).out == accepted([*command, 72]).out


def test_a_run_beside_a_users_own_readme(here: Path) -> None:
    Path("notes").mkdir()
    Path("notes/README.md").write_text("my own notes\n")
    ending = run([*TRAIN, "--out", "notes"])
    assert ending.raised is None and ending.status in (0, 2), ending
    assert Path("notes/README.md").read_text() == "my own notes\n"


def test_a_link_to_nowhere_as_out(here: Path) -> None:
    Path("link").symlink_to("nowhere/at/all")
    refused([*TRAIN, "--out", "link"], "link")


def test_a_directory_that_has_a_bundled_name_is_taken_by_its_path(
    here: Path, gpt2_dir: Path
) -> None:
    shutil.copytree(gpt2_dir, "reel-nano")
    ending = accepted(["sample", "./reel-nano", "--prompt", "w1 w2", "-n", 1, "--gen-len", 4])
    assert re.search(r"\bw1 w2\b", ending.out)


def test_a_reward_model_does_not_write(here: Path, judge: Path) -> None:
    refused(["sample", judge, "-n", 1], "reward model")


# Runs that change while a trainer is away


def test_a_reward_model_that_was_trained_anew_meanwhile(here: Path, judge: Path) -> None:
    shutil.copytree(judge, "judge")
    args = settings(reward_fn="learned", reward_model="judge", total_phases=3)
    trainer = RLHFTrainer(args, out="made")
    trainer.run_phase()
    del trainer
    head = load_file("judge/reward_head.safetensors")
    head["head.weight"] *= -1
    save_file(head, "judge/reward_head.safetensors")
    ending = run(["resume", "made"])
    told(ending)
    assert "reward_model='judge'" in ending.err


def test_two_trainers_that_were_made_before_either_began(here: Path) -> None:
    first = RLHFTrainer(settings(), out="made")
    second = RLHFTrainer(settings(seed=2), out="made")
    first.run_phase()
    refuses(second.run_phase, "made")
    first.run_phase()
    assert json.loads(Path("made/run.json").read_text())["args"]["seed"] == 1
    assert len(lines(Path("made/metrics.jsonl"))) == 2


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_that_is_taken_away_while_it_trains(here: Path, how: str) -> None:
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


def test_a_model_without_some_of_its_weights(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "model")
    tensors = load_file("model/model.safetensors")
    lost = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    del tensors[lost]
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})
    refused(["sample", "model", "--prompt", "w1", "-n", 1], "model", "h.1.mlp.c_fc.weight")


def test_a_shard_that_is_not_there(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "model")
    names = load_file("model/model.safetensors")
    Path("model/model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../../elsewhere.safetensors")}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    refused(["sample", "model", "--prompt", "w1", "-n", 1], "model")


def test_a_model_in_four_bits(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "model")
    four = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    edit(Path("model/config.json"), lambda config: config | four)
    refused(["sample", "model", "--prompt", "w1", "-n", 1], "quanti")


def test_a_model_in_half_precision_is_trained_in_full(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "model")
    halves = {k: v.half() for k, v in load_file("model/model.safetensors").items()}
    save_file(halves, "model/model.safetensors", metadata={"format": "pt"})
    edit(Path("model/config.json"), lambda config: config | {"dtype": "float16"})
    assert {p.dtype for p in load_model("model").parameters()} == {torch.float32}


NAMELESS = {"a path": Path, "nothing": lambda path: "", "a number": lambda path: 3}


@pytest.mark.parametrize("name", NAMELESS)
def test_what_load_model_is_asked_for(gpt2_dir: Path, name: str) -> None:
    source = NAMELESS[name](gpt2_dir)
    if name == "a path":
        assert load_model(source).cfg.d_model == 16
    else:
        refuses(lambda: load_model(source))


LABELS = {
    "not positive": ("not positive", "positive"),
    "neither": ("NEGATIVE", "NEUTRAL"),
    "both positive": ("Positive", "positive"),
    "stars": ("1 star", "5 stars"),
    "only one says no": ("non-negative", "negative"),
}


@pytest.mark.parametrize("name", LABELS)
def test_classes_that_could_be_mistaken(
    classifier: Callable[..., Path], here: Path, name: str
) -> None:
    place = classifier(*LABELS[name])
    rewarded = {"not positive": 1, "only one says no": 0}
    if name in rewarded:
        assert SentimentReward(str(place)).rewarded_class == rewarded[name]
    else:
        refuses(lambda: SentimentReward(str(place)), *LABELS[name])


def test_a_label_and_its_number_that_contradict_each_other(
    classifier: Callable[..., Path], here: Path
) -> None:
    place = classifier("NEGATIVE", "POSITIVE", label2id={"POSITIVE": 0, "NEGATIVE": 1})
    refuses(lambda: SentimentReward(str(place)), "label2id")


def test_a_positive_label_that_no_class_has(classifier: Callable[..., Path], here: Path) -> None:
    classifier("angry", "glad")
    words = ["positive_label", "happy", "angry", "glad"]
    refused(["score", "x", "--reward-model", "classifier", "--positive-label", "happy"], *words)


def test_the_negative_direction_of_an_own_label(classifier: Callable[..., Path]) -> None:
    place = str(classifier("angry", "glad"))
    assert SentimentReward(place, "neg", positive_label="glad").rewarded_class == 0


JUDGES = {
    "no spread": {"std": 0.0},
    "a spread below 0": {"std": -1.0},
    "a mean for every word": {"mean": [0.0, 1.0]},
    "a mean that is none": {"mean": math.nan},
}


@pytest.mark.parametrize("name", JUDGES)
def test_a_reward_model_whose_notes_were_edited(here: Path, judge: Path, name: str) -> None:
    shutil.copytree(judge, "judge")
    head = load_file("judge/reward_head.safetensors")
    assert set(JUDGES[name]) <= set(head), head
    changed = {key: torch.tensor(value) for key, value in JUDGES[name].items()}
    save_file(head | changed, "judge/reward_head.safetensors")
    command = ["score", "this movie", "--reward-fn", "learned", "--reward-model", "judge"]
    refused(command, "reward_head.safetensors")


@pytest.mark.parametrize("how", ["gone", "wider", "nan"])
def test_a_reward_head_that_does_not_fit(here: Path, judge: Path, how: str) -> None:
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
def test_a_file_from_windows(here: Path, kind: str) -> None:
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
    "a prompt twice in a row": ("p.jsonl", '{"prompt": "this", "prompt": "movie"}\n', ["prompt"]),
    "a prompt of blanks": ("p.jsonl", '{"prompt": "   "}\n', ["p.jsonl", "1"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_prompts_that_could_be_misread(here: Path, name: str) -> None:
    file, text, words = FILES[name]
    Path(file).write_text(text)
    refused([*TRAIN, "--prompts", file, "--no-prepend-bos"], *words)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.csv"])
def test_a_pipe_that_nobody_writes_to(here: Path, name: str) -> None:
    os.mkfifo(name)
    arguments = {
        "p.txt": [*TRAIN, "--prompts", name],
        "p.jsonl": ["train-reward", "--pairs", name, "--out", "made", *FIT],
        "p.csv": ["sft", "--texts", name, "--out", "made", *QUICK],
    }
    refused(arguments[name], name)


PAIRS = {
    "a margin that is none": ([{"margin": math.nan}], ["--margin", 1], ["margin"]),
    "a margin without end": ([{"margin": math.inf}], ["--margin", 1], ["margin"]),
    "a margin of text": ([{"margin": "large"}], ["--margin", 1], ["margin"]),
    "texts that are equal": ([{"rejected": "this movie was good"}], [], ["chosen", "rejected"]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_prefer_nothing(here: Path, name: str) -> None:
    changes, options, words = PAIRS[name]
    pair = {"chosen": "this movie was good", "rejected": "this movie was bad", "margin": 1.0}
    rows = [pair | change for change in changes * 20]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    refused(["train-reward", "--pairs", "pairs.jsonl", "--out", "made", *FIT, *options], *words)


@pytest.mark.parametrize("command", ["train-reward", "dpo"])
def test_learning_that_explodes_leaves_no_model(here: Path, command: str) -> None:
    options = ["--learning-rate", 1e30, *(FIT if command == "train-reward" else QUICK)]
    refused([command, "--pairs", "reel", "--n-pairs", 60, "--out", "made", *options], "learning")
    assert not Path("made").exists()


# Pages and terminals


SPOKEN = {
    "a prompt": ["sample", "RUN", "--prompt", f"this {ESCAPE}"],
    "a path": ["resume", f"no{ESCAPE}"],
    "a path of two lines": ["report", "no\nrlhf_lab: all is well."],
    "a checkpoint": ["sample", "RUN", "--checkpoint", f"{ESCAPE}best"],
    "a text that turns": ["sample", "RUN", "--prompt", "this \u202egnihtemos"],
    "a stop token": [*TRAIN, "--stop-tokens", ESCAPE],
}


@pytest.mark.parametrize("name", SPOKEN)
def test_a_sentence_does_not_drive_the_terminal(here: Path, name: str) -> None:
    ending = refused(SPOKEN[name])
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", ending.err), ascii(ending.err)


NASTY = '"><script>alert(1)</script><p onmouseover="x'


def test_names_and_titles_are_escaped_in_every_picture() -> None:
    pages = [
        str(tokens_html(["good"], [1.0], name=NASTY)),
        curves({NASTY: ([0, 1], [1.0, 2.0])}, NASTY, NASTY, NASTY).svg,
        heatmap([[1.0]], [NASTY], [NASTY], NASTY).svg,
    ]
    assert not [page for page in pages if "<script" in page or '<p onmouseover="' in page]


def test_curves_of_numbers_that_are_none() -> None:
    svg = curves({"a": ([0, 1, 2], [math.nan, math.inf, 1.0])}, "title").svg
    coordinates = re.findall(r'(?:points|d|x|y|cx|cy)="([^"]*)"', svg)
    assert not [found for found in coordinates if "nan" in found or "inf" in found]
    assert sparkline([]) == "" and sparkline([math.nan]) in ("", " ")


def test_a_report_of_a_run_without_a_phase(here: Path) -> None:
    trainer = RLHFTrainer(settings(), out="made")
    trainer.start()
    del trainer
    accepted(["report", "made"])
    assert "<html" in Path("made/report.html").read_text()


def test_a_report_of_metrics_that_are_text(here: Path) -> None:
    rows = [line | {"mean_reward": "<script>"} for line in lines(Path("RUN/metrics.jsonl"))]
    Path("RUN/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(["report", "RUN"], "metrics.jsonl", "mean_reward")


# Learner code


class Odd(BaseException):
    """No Exception, and with words that Rich would take for markup."""


def raising(error: BaseException) -> Callable[..., Any]:
    def masked_mean(*arguments: Any, **options: Any) -> Any:
        raise error

    return masked_mean


def returning(value: Any) -> Callable[..., Any]:
    def masked_mean(*arguments: Any, **options: Any) -> Any:
        return value

    return masked_mean


async def masked_mean(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """An exercise that someone wrote as a coroutine."""
    return x.mean()


LEARNERS = {
    "an error with markup": (raising(ValueError("[/red] [bold]no[/nope]")), "[/red]"),
    "an error with half a character": (raising(ValueError("\udcff")), "ValueError"),
    "an error that is no Exception": (raising(Odd("stop")), "Odd"),
    "an error of many lines": (raising(ValueError("line\n" * 5000)), "ValueError"),
    "no end of calls": (raising(RecursionError("maximum depth")), "RecursionError"),
    "the end of a loop": (raising(StopIteration()), "StopIteration"),
    "nothing": (returning(None), "None"),
    "a tensor without numbers": (returning(torch.empty((), device="meta")), "meta"),
    "a number of NumPy": (returning(np.float32(0.5)), "float32"),
    "complex numbers": (returning(torch.tensor(1j)), "complex"),
    "a coroutine": (masked_mean, "coroutine"),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_check_survives_what_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("HOME", str(here))
    function, word = LEARNERS[name]
    with contextlib.suppress(CheckNotPassed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(function)
    shown = capsys.readouterr().out
    assert word in shown and len(shown) < 20_000


STRAY = {
    "gradients off": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "another default": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "another directory": (lambda: os.chdir("/"), os.getcwd),
    "no more output": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout is None),
    "other noise": (lambda: torch.manual_seed(0), lambda: torch.random.get_rng_state().tolist()),
}


@pytest.mark.parametrize("name", STRAY)
def test_check_leaves_the_process_as_it_found_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    change, state = STRAY[name]
    torch.manual_seed(11)
    before = state()

    def masked_mean(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        change()
        return x.mean()

    stdout = sys.stdout
    try:
        with contextlib.suppress(CheckNotPassed):
            check(masked_mean)
        assert state() == before
    finally:
        sys.stdout = stdout
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        os.chdir(here)


@pytest.mark.parametrize("thing", [None, "masked_mean", 3, print], ids=repr)
def test_check_of_no_exercise(thing: Any) -> None:
    with pytest.raises(ValueError, match="exercise"):
        check(thing)


# Rewards, and learning that is dead or explodes


GOOD_REWARDS = {
    "a list": lambda texts: [0.5] * len(texts),
    "a list of integers and flags": lambda texts: [True, 0] * (len(texts) // 2),
    "a tuple of NumPy numbers": lambda texts: tuple(np.float32(0.5) for _ in texts),
    "an array of float64": lambda texts: np.full(len(texts), 0.5),
    "integers": lambda texts: torch.tensor([1, 0] * (len(texts) // 2)),
    "half precision": lambda texts: torch.full((len(texts),), 0.5, dtype=torch.float16),
    "with a gradient": lambda texts: torch.full((len(texts),), 0.5, requires_grad=True) * 1,
}


@pytest.mark.parametrize("name", GOOD_REWARDS)
def test_one_number_per_text_is_a_reward(idle: RLHFTrainer, name: str) -> None:
    trainer = RLHFTrainer(settings(), policy=idle.policy, reward_fn=GOOD_REWARDS[name])
    rewards = trainer.rollout_phase().raw_rewards
    assert rewards.mean() == 0.5 and rewards.dtype == torch.float32 and not rewards.requires_grad


async def later(texts: list[str]) -> list[float]:
    return [0.0] * len(texts)


BAD_REWARDS = {
    "a column": lambda texts: torch.zeros(len(texts), 1),
    "one number": lambda texts: 0.5,
    "a tensor without axes": lambda texts: torch.tensor(0.5),
    "one too few": lambda texts: [0.0] * (len(texts) - 1),
    "numbers in words": lambda texts: ["0.5"] * len(texts),
    "none for one text": lambda texts: [0.5] * (len(texts) - 1) + [None],
    "a dictionary": lambda texts: {text: 0.5 for text in texts},
    "nothing": lambda texts: None,
    "complex numbers": lambda texts: torch.zeros(len(texts), dtype=torch.complex64),
    "beyond float32": lambda texts: np.full(len(texts), 1e300),
    "an integer beyond floats": lambda texts: [10**400] * len(texts),
    "a coroutine": later,
    "rows of two": lambda texts: [[0.5, 0.5]] * len(texts),
}


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("name", BAD_REWARDS)
def test_what_is_no_number_per_text(here: Path, idle: RLHFTrainer, name: str) -> None:
    given = {"out": "made", "policy": idle.policy, "reward_fn": BAD_REWARDS[name]}
    refuses(lambda: RLHFTrainer(settings(total_phases=1), **given), "reward_fn")
    assert not Path("made").exists()


def test_rewards_near_the_end_of_float32_are_refused_or_learned_from(here: Path) -> None:
    def huge(texts: list[str]) -> torch.Tensor:
        return torch.tensor([3e38, -3e38] * (len(texts) // 2))

    trainer = RLHFTrainer(settings(), out="made", reward_fn=huge)
    with contextlib.suppress(LabError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert all(value.isfinite().all() for value in trainer.policy.parameters())
    for path in here.glob("made/*.json*"):
        assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_a_reward_that_raises_loses_nothing_that_was_saved(
    here: Path, plain: dict[str, torch.Tensor]
) -> None:
    calls = []

    def fails_once(texts: list[str]) -> torch.Tensor:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyError("the judge's server is down")
        return long_texts(texts)

    trainer = RLHFTrainer(settings(), out="made", reward_fn=fails_once)
    with pytest.raises((KeyError, LabError)):
        trainer.train()
    del trainer
    again = RLHFTrainer.resume("made", reward_fn=long_texts)
    again.train()
    assert same(weights(again), plain)


def spoil_texts(texts: list[str]) -> torch.Tensor:
    rewards = long_texts(texts)
    texts.clear()
    return rewards


def turn_off_gradients(texts: list[str]) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return long_texts(texts)


def seed_everything(texts: list[str]) -> torch.Tensor:
    torch.manual_seed(0)
    np.random.seed(0)
    return long_texts(texts)


def change_the_default(texts: list[str]) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return long_texts(texts).float()


@pytest.mark.parametrize(
    "reward_fn", [spoil_texts, turn_off_gradients, seed_everything, change_the_default]
)
def test_what_a_reward_does_beside_scoring_changes_no_weight(
    here: Path, plain: dict[str, torch.Tensor], reward_fn: Callable[..., torch.Tensor]
) -> None:
    trainer = RLHFTrainer(settings(), out="made", reward_fn=reward_fn)
    try:
        trainer.train()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    assert same(weights(trainer), plain)
    assert all(line["text"] for line in lines(Path("made/samples.jsonl")))


def test_a_reward_that_uses_one_buffer_for_all_its_answers(here: Path) -> None:
    buffer = torch.zeros(16)

    def reusing(texts: list[str]) -> torch.Tensor:
        buffer[: len(texts)] = long_texts(texts)
        return buffer[: len(texts)]

    found = []
    for reward_fn in (long_texts, reusing):
        args = settings(advantages="remax", vf_coef=0.0, normalize_reward=False)
        trainer = RLHFTrainer(args, out=reward_fn.__name__, reward_fn=reward_fn)
        trainer.train()
        found.append(weights(trainer))
    assert same(*found)


DEAD = {
    "nothing ends": ["--penalize-no-eos"],
    "nothing learns": ["--base-lr", 0, "--head-lr", 0],
    "no reward, scaled": ["--reward-fn", "zero", "--reward-scaling", "scale", *RAW],
    "a word that never comes": ["--reward-fn", "count:zebra"],
}


@pytest.mark.parametrize("name", DEAD)
def test_learning_from_nothing_is_said(here: Path, name: str) -> None:
    ending = accepted([*TRAIN, "--total-phases", 3, "--out", "made", *DEAD[name]])
    remarks = json.loads(Path("made/run.json").read_text())["remarks"]
    (remark,) = remarks.values()
    assert re.search("nothing (tells|learns)", remark["text"]) and remark["text"] in ending.out
    for path in here.glob("made/*.json*"):
        assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


# The Python API's doors


PARTS = {
    "a name as reward": ({"reward_fn": "sentiment"}, ["reward_fn"]),
    "a number as truth": ({"gold_fn": 3}, ["gold_fn"]),
    "a name as policy": ({"policy": "reel-nano"}, ["policy"]),
    "a name as reference": ({"reference": "reel-nano"}, ["reference"]),
    "one text as prompts": ({"prompts": "this movie"}, ["prompts"]),
    "no prompts": ({"prompts": []}, ["prompts"]),
    "a prompt that is a number": ({"prompts": ["this movie", 3]}, ["prompts"]),
    "a number as controller": ({"kl_controller": 0.3}, ["kl_controller"]),
    "a name as penalty": ({"kl_penalty": "exact"}, ["kl_penalty"]),
    "a part misspelt": ({"rewad_fn": long_texts}, ["rewad_fn", "reward_fn"]),
    "an optimiser": ({"optimizer": torch.optim.SGD}, ["optimizer"]),
    "a directory that is a number": ({"out": 3}, ["out"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_kind(here: Path, name: str) -> None:
    parts, words = PARTS[name]
    with untouched(here):
        refuses(lambda: RLHFTrainer(settings(), **parts), *words)


@pytest.mark.parametrize("args", [{"preset": "reel"}, "reel", None], ids=repr)
def test_settings_of_another_kind(here: Path, args: Any) -> None:
    refuses(lambda: RLHFTrainer(args), "RLHFArgs")


def test_a_reference_that_is_the_policy_itself(idle: RLHFTrainer) -> None:
    """It is warned of, not refused: a lesson studies such a run."""
    policy = idle.policy
    with pytest.warns(UserWarning, match="reference has weights of the policy's"):
        RLHFTrainer(settings(), policy=policy, reference=policy.base_model)


def test_a_reference_with_other_words(idle: RLHFTrainer, gpt2_dir: Path) -> None:
    parts = {"policy": idle.policy, "reference": load_model(str(gpt2_dir))}
    refuses(lambda: RLHFTrainer(settings(), **parts), "reference")


def test_a_policy_with_nothing_to_train(here: Path) -> None:
    policy = RLHFTrainer(settings()).policy
    policy.requires_grad_(False)
    refuses(lambda: RLHFTrainer(settings(), policy=policy), "policy")


FUNCTIONS = {
    "nothing": lambda *a, **k: None,
    "one per text": lambda *a, **k: torch.zeros(8),
    "without an end": lambda *a, **k: torch.tensor(math.inf),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_penalty_that_is_no_number(here: Path, name: str) -> None:
    trainer = RLHFTrainer(settings(total_phases=1), out="made", kl_penalty=FUNCTIONS[name])
    refuses(trainer.train)


def test_advantages_of_another_shape(here: Path) -> None:
    def my_advantages(rewards: torch.Tensor) -> torch.Tensor:
        return rewards[:, None]

    trainer = RLHFTrainer(settings(total_phases=1), out="made", advantages=my_advantages)
    with pytest.raises(ValueError, match=r"advantages .* \(16, 1\) .* one number per token"):
        trainer.train()


def test_a_controller_that_loses_its_mind(here: Path) -> None:
    class Controller:
        kl_coef = 0.3

        def update(self, *arguments: Any, **options: Any) -> None:
            self.kl_coef = math.nan

    trainer = RLHFTrainer(settings(), out="made", kl_controller=Controller())
    refuses(trainer.train, "kl_co")


ASKED = {
    "one text": "this movie",
    "no prompts": [],
    "no tokens": [[]],
    "a token beyond the words": [[10**6]],
    "a token below 0": [[-1]],
    "texts and tokens": ["this movie", [1, 2]],
    "a number": 3,
}


@pytest.mark.parametrize("name", ASKED)
def test_prompts_that_cannot_be_answered(idle: RLHFTrainer, name: str) -> None:
    refuses(lambda: idle.generate(ASKED[name]))


def test_prompts_without_a_token(here: Path, idle: RLHFTrainer) -> None:
    trainer = RLHFTrainer(settings(prepend_bos=False), policy=idle.policy)
    refuses(lambda: trainer.generate([""]), "prompts[0]")


STEPS = {
    "scores of text": {"scores": ["1"] * 16},
    "a score that is none": {"scores": [math.nan] * 16},
    "scores in rows of two": {"scores": torch.zeros(16, 2)},
    "a score too few": {"scores": [0.0] * 15},
    "tokens beyond the words": {"queries": [[1]] * 16, "responses": [[10**6]] * 16},
    "nothing to learn from": {"response_masks": [[0] * 3] * 16},
    "a mask of another length": {"response_masks": [[1] * 7] * 16},
    "one text": {"responses": "was so good" * 16},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_what_does_not_fit(idle: RLHFTrainer, name: str) -> None:
    fitting = {"queries": ["this movie"] * 16, "responses": ["was so good"] * 16}
    fitting |= {"scores": [1.0, 0.0] * 8}
    before = weights(idle)
    refuses(lambda: idle.step(**(fitting | STEPS[name])))
    assert same(weights(idle), before) and idle.run is None


@pytest.mark.parametrize("name", ["../../RUN/metrics", "../run", "/etc/passwd", ""])
def test_a_name_of_a_record_does_not_leave_the_run(here: Path, name: str) -> None:
    Path("RUN/returned").mkdir()
    refuses(lambda: Run("RUN").returned(name))
    refuses(lambda: Run("RUN").records(name))
    refuses(lambda: Run("RUN").tensors(name, 0))


# Callbacks, captures, probes and interventions of the user's own


@pytest.fixture
def trainer(here: Path) -> RLHFTrainer:
    return RLHFTrainer(settings(), out="made", reward_fn=long_texts)


def test_a_function_that_returns_a_phase_of_its_own(trainer: RLHFTrainer) -> None:
    @trainer.on("after_phase")
    def mine(ctx: Any) -> dict[str, Any]:
        return {"phase": 99, "event": "nowhere", "value": ctx.phase}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    with contextlib.suppress(LabError):
        rows = Run("made").returned("mine")
        assert [(row["phase"], row["event"]) for row in rows] == [
            (0, "after_phase"),
            (1, "after_phase"),
        ]


@pytest.mark.parametrize("name", ["../../../evil", "x" * 400, "", "a\0b", ".", "con"])
def test_a_function_with_a_name_that_is_no_file(
    trainer: RLHFTrainer, tmp_path: Path, name: str
) -> None:
    def mine(ctx: Any) -> dict[str, Any]:
        return {"value": ctx.phase}

    mine.__name__ = name
    trainer.on("after_phase")(mine)
    before = {path for path in tmp_path.iterdir()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run_phase()
    assert len(lines(Path("made/metrics.jsonl"))) == 1
    assert {path for path in tmp_path.iterdir()} - before == {tmp_path / "made"}
    assert caught or [Run("made").returned(found) for found in Run("made").functions()]


def leave(ctx: Any) -> None:
    sys.exit(0)


def keep(activation: Any, where: Any) -> Any:
    return activation


def no_gradients(ctx: Any) -> None:
    torch.set_grad_enabled(False)


def freeze(ctx: Any) -> None:
    ctx.policy.eval()


def spoil_rewards(ctx: Any) -> dict[Any, Any]:
    return {("a", 1): {2: object()}}


def register_more(ctx: Any) -> None:
    REGISTERING[0].on("after_score")(register_more)


REGISTERING: list[RLHFTrainer] = []


@pytest.mark.parametrize("function", [no_gradients, freeze, spoil_rewards, register_more])
def test_a_function_that_forgets_to_tidy_up(
    trainer: RLHFTrainer, plain: dict[str, torch.Tensor], function: Callable[..., Any]
) -> None:
    REGISTERING[:] = [trainer]
    trainer.on("after_score")(function)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
    finally:
        torch.set_grad_enabled(True)
    assert same(weights(trainer), plain)


def test_a_function_that_trains(trainer: RLHFTrainer, plain: dict[str, torch.Tensor]) -> None:
    @trainer.on("after_phase")
    def again(ctx: Any) -> None:
        trainer.run_phase()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert [line["phase"] for line in lines(Path("made/metrics.jsonl"))] == [0, 1]
    assert same(weights(trainer), plain)


def test_a_function_that_ends_the_program_leaves_a_run_that_goes_on(
    trainer: RLHFTrainer, plain: dict[str, torch.Tensor]
) -> None:
    trainer.on("after_phase")(leave)
    with contextlib.suppress(SystemExit), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    again = RLHFTrainer.resume("made", reward_fn=long_texts)
    again.train()
    assert same(weights(again), plain)


LISTENING = {
    "a decorator without its event": (lambda t: t.on(leave), []),
    "an event misspelt": (lambda t: t.on("after_scores"), ["after_scores", "after_score"]),
    "half a phase": (lambda t: t.on("after_score", every=1.5), ["every"]),
    "no function": (lambda t: t.on("after_score")(3), []),
    "a site misspelt": (lambda t: t.capture("blocks.0.hook_resid")(leave), ["blocks.0.hook_resid"]),
    "a layer too many": (lambda t: t.capture("blocks.9.hook_mlp_out")(leave), ["blocks.9"]),
    "no sites": (lambda t: t.capture([])(leave), ["hook_names"]),
    "no function at a site": (lambda t: t.intervene("blocks.0.hook_mlp_out", 3), []),
    "half of a run as text": (
        lambda t: t.intervene("blocks.0.hook_mlp_out", keep, during="rollouts"),
        ["during"],
    ),
    "no half of a run": (
        lambda t: t.intervene("blocks.0.hook_mlp_out", keep, during=()),
        ["during"],
    ),
    "no name": (lambda t: t.intervene("blocks.0.hook_mlp_out", keep, name=""), ["name"]),
}


@pytest.mark.parametrize("name", LISTENING)
def test_listening_to_what_is_not_there(idle: RLHFTrainer, name: str) -> None:
    act, words = LISTENING[name]
    refuses(lambda: act(idle), *words)


def test_a_position_that_no_text_has(trainer: RLHFTrainer, plain: dict[str, torch.Tensor]) -> None:
    seen = []

    def look(ctx: Any, acts: torch.Tensor) -> None:
        seen.append(acts)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.capture("blocks.0.hook_mlp_out", pos=999)(look)
        except ConfigError as error:
            assert "pos" in str(error)
            return
        trainer.train()
    assert any("pos" in str(warning.message) for warning in caught)
    assert not seen and same(weights(trainer), plain)


CHANGERS = {
    "another shape": lambda act, where: act[:, :1],
    "a number": lambda act, where: 0.0,
    "a text": lambda act, where: "zero",
    "not a number": lambda act, where: act * math.nan,
    "more precision": lambda act, where: act.double(),
}


@pytest.mark.parametrize("name", CHANGERS)
def test_an_intervention_that_returns_no_activation(trainer: RLHFTrainer, name: str) -> None:
    trainer.intervene("blocks.0.hook_mlp_out", CHANGERS[name], name="changer")
    words = [] if name == "not a number" else ["changer"]
    refuses(trainer.train, *words)


class Mine(Probe):
    """A probe of a user's own, whose record is set from outside."""

    record: Any = None

    def observe(self, seen: Any) -> Any:
        return self.record(seen) if callable(self.record) else self.record


FINE = Check("all is well", 0.0, 1.0, True)
TABLE = torch.arange(6.0).reshape(2, 3)
RECORDS = {
    "tensors that share memory": (Record(tensors={"a": TABLE, "b": TABLE}, checks=[FINE]), True),
    "a transposed tensor": (Record(tensors={"a": TABLE.T}, checks=[FINE]), True),
    "a tensor with a gradient": (
        Record(tensors={"a": TABLE.clone().requires_grad_() * 2}, checks=[FINE]),
        True,
    ),
    "nothing": (None, False),
    "a dictionary": ({"values": {}}, False),
    "no checks": (Record(values={"a": 1}), False),
    "what JSON has not": (Record(values={"a": object()}, checks=[FINE]), False),
    "an error": (lambda seen: 1 / 0, False),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_probe_of_ones_own(trainer: RLHFTrainer, name: str) -> None:
    Mine.record, stored = RECORDS[name]
    if callable(Mine.record):
        Mine.record = staticmethod(Mine.record)
    attach(trainer, Mine(name="mine"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run_phase()
    assert len(lines(Path("made/metrics.jsonl"))) == 1
    if stored:
        assert torch.equal(
            Run("made").tensors("mine", 0)["a"].flatten().sort()[0][:1], TABLE[0, :1]
        )
    else:
        assert any("mine" in str(warning.message) for warning in caught)


class Misspelt(Mine):
    events = ("after_scores",)


class Letters(Mine):
    events = "after_score"


class Elsewhere(Mine):
    sites = ("blocks.7.hook_nothing",)
    text = "rollout"


class Empty(Probe):
    pass


SUITES = {
    "an event misspelt": (lambda: Suite(Misspelt(name="mine")), ["after_scores"]),
    "a site misspelt": (lambda: Suite(Elsewhere(name="mine")), ["blocks.7"]),
    "a class": (lambda: Suite(Mine), ["Mine"]),
    "a name that leaves": (lambda: Suite(Mine(name="../../evil")), ["evil"]),
    "a name of nothing": (lambda: Suite(Mine(name="")), ["name"]),
    "never": (lambda: Suite(Mine(name="mine", every=0)), ["every"]),
    "labels of another number": (
        lambda: Suite(
            Mine(name="mine"), eval_text=["this movie"] * 3, labels=torch.tensor([True, False])
        ),
        ["labels"],
    ),
    "tokens beyond the words": (
        lambda: Suite(Mine(name="mine"), eval_tokens=torch.full((2, 3), 10**6)),
        ["eval_tokens"],
    ),
    "no text": (
        lambda: Suite(Mine(name="mine"), eval_text=[]),
        ["eval_text"],
    ),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_that_cannot_look(idle: RLHFTrainer, name: str) -> None:
    make, words = SUITES[name]
    refuses(lambda: attach(idle, make()), *words)


def test_an_event_given_as_a_text(trainer: RLHFTrainer) -> None:
    Letters.record = Record(values={"a": 1}, checks=[FINE])
    try:
        attach(trainer, Letters(name="mine"))
    except ConfigError:
        return
    trainer.train()
    assert len(Run("made").records("mine")) == 2


def test_a_trainer_in_a_thread_of_its_own(trainer: RLHFTrainer, plain: dict[str, Any]) -> None:
    errors = []

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(60)
    assert not errors and same(weights(trainer), plain)


# The environment


def test_no_place_for_temporary_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", None)
    accepted(["export", "RUN", "made"])
    accepted([*TRAIN, "--out", "other"])


def test_a_home_that_is_a_file(
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


def test_progress_that_is_damaged_is_not_written_over(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.process
def test_what_is_printed_to_a_full_device(here: Path, warm_python: Any) -> None:
    with open(os.devnull) as given, open("/dev/full", "w") as full, open("err", "w+") as err:
        files = given.fileno(), full.fileno(), err.fileno()
        status = warm_python.start(["-m", "rlhf_lab", "score", "this movie"], files).wait()
    said = Path("err").read_text()
    sentences = [line for line in said.splitlines() if not line.startswith("rewarding")]
    assert status == 2 and "no space left" in said and len(sentences) == 1, (status, said)


@pytest.mark.process
@pytest.mark.parametrize("name", ["narrow terminal", "no home"])
def test_a_poor_environment(here: Path, warm_python: Any, name: str) -> None:
    environment = dict(warm_python.environment)
    if name == "no home":
        del environment["HOME"]
    else:
        environment["COLUMNS"] = "24"
    with untouched(here):
        done = warm_python.run(["-m", "rlhf_lab", "sample", "RUN", "-n", "1"], env=environment)
    assert done.returncode == 0 and "movie" in done.stdout and not done.stderr, done
