"""The command line, as real processes: what it prints, what it refuses, what it leaves behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from safetensors.torch import load_file

from rlhf_lab.config import GROUPS, RLHFArgs
from rlhf_lab.probes import Run
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint
from tests.terminal import on_a_terminal
from tests.warm import WarmProcess, WarmPython

Process = subprocess.CompletedProcess

SMALL = (
    "train --preset reel --total-phases 2 --batch-size 16 --num-minibatches 2 --warmup-steps 1"
    " --seed 1"
).split()


@pytest.fixture(scope="session")
def cli(warm_python) -> Callable[..., Process]:
    """Runs one command, in a process that starts quickly."""
    return lambda *arguments, **options: warm_python.run(lab(arguments), **options)


@pytest.fixture(scope="session")
def cold_cli(cold_python) -> Callable[..., Process]:
    """Runs one command as from the shell."""
    return lambda *arguments, **options: cold_python(lab(arguments), **options)


def lab(arguments: Iterable[str | Path]) -> list[str]:
    """What follows `python`."""
    return ["-m", "rlhf_lab", *map(str, arguments)]


@pytest.fixture(scope="session")
def all_of(cli, cold_cli) -> Callable[[dict[str, list[Any]], tuple[str, ...]], dict[str, Process]]:
    """Runs many commands: those named in `cold` as from the shell."""

    def run(commands: dict[str, list[Any]], cold: tuple[str, ...] = ()) -> dict[str, Process]:
        return {
            name: (cold_cli if name in cold else cli)(*arguments)
            for name, arguments in commands.items()
        }

    return run


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="session")
def main_job(cold_cli, place) -> tuple[Process, Path]:
    """The main job in small, once for all tests that look at a finished run."""
    out = place / "demo"
    return cold_cli(*SMALL, "--out", out), out


@pytest.fixture(scope="session")
def half_a_run(place) -> Path:
    """A run that was broken off after the first of two phases."""
    args = RLHFArgs(
        preset="reel", total_phases=2, batch_size=16, num_minibatches=2, warmup_steps=1, gen_len=8
    )
    trainer = RLHFTrainer(args, out=place / "half")
    trainer.run_phase()
    trainer.recorder.break_off()  # behind the thread that writes its checkpoint
    return trainer.run.path


def assert_one_sentence(done: Process, *words: str) -> None:
    """Status 2, and one line on standard error that a person can use."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Loading weights")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("rlhf_lab: ") and lines[0].endswith((".", ")"))
    for word in words:
        assert word in lines[0], lines[0]


def test_help_lists_every_command(cold_cli):
    done = cold_cli("--help")
    assert done.returncode == 0 and done.stderr == ""
    names = "train resume sample score train-reward sft dpo kto orpo best-of-n compare export"
    for command in [*names.split(), "doctor"]:
        assert re.search(rf"• {command} ", done.stdout), command


def test_help_of_every_command_reads_well(all_of):
    commands = {
        name.replace(" ", "_"): [*name.split(), "--help"]
        for name in (
            "train",
            "resume",
            "sample",
            "score",
            "train-reward",
            "best-of-n",
            "compare",
            "sft",
            "dpo",
            "export",
            "doctor",
        )
    }
    for name, done in all_of(commands, ("train", "resume")).items():
        assert done.returncode == 0 and done.stderr == "", name
        assert f"usage: rlhf_lab {name.replace('_', ' ')}" in done.stdout, name


def test_help_of_train_shows_every_field_with_its_default_in_the_preset(cli):
    done = cli("train", "--help", "--preset", "smol")
    unwrapped = re.sub(r"[\s│]+", " ", done.stdout)
    for name, value in RLHFArgs(preset="smol").to_dict().items():
        option = unwrapped.split(f" --{name.replace('_', '-')}", 1)[1]
        shown = re.search(r"\(default: (.*?)\)", option)[1]
        assert shown.strip("'") == str(value), name
    assert all(f"─ {title} options ─" in done.stdout for title in GROUPS)


def test_the_main_job_ends_well_with_plain_lines(main_job):
    done, out = main_job
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("phase ")] == [
        "phase 0",
        "phase 1",
    ]
    assert "samples of phase 0, before learning:" in lines
    assert sum("this movie" in line for line in lines) == 10
    assert lines[-1] == f"written to {out}"


def test_the_main_job_writes_its_figures(main_job):
    done, out = main_job
    info = json.loads((out / "run.json").read_text())
    assert {"args", "versions", "final"} <= info.keys()
    final = info["final"]
    for name in ("mean_reward", "gold_reward", "grammatical_fraction", "kl_per_sequence"):
        assert isinstance(final[name], float)
        assert f"{name} {final[name]:.3f}" in done.stdout
    assert 0.2 < final["mean_reward"] < 0.9 and final["grammatical_fraction"] > 0.8
    assert info["args"]["batch_size"] == 16 and info["args"]["base_model"] == "reel-nano"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((out / "samples.jsonl").read_text().splitlines()) == 3 * 16
    names = {p.name for p in (out / "checkpoints").iterdir()}
    assert {"phase_000000.safetensors", "best.safetensors", "last.safetensors"} < names
    assert all(p.suffix == ".safetensors" for p in (out / "checkpoints").iterdir())


def test_resuming_the_finished_job_says_that_nothing_is_left(main_job, cli):
    done = cli("resume", main_job[1])
    assert done.returncode == 0 and done.stderr == ""
    assert "is finished; nothing is left to do" in done.stdout


def test_on_a_terminal_a_live_panel_is_drawn(warm_python, surroundings, place):
    arguments = [*SMALL, "--total-phases", "3", "--out", str(place / "panel")]
    status, drawn = on_a_terminal(warm_python, lab(arguments), surroundings)
    assert status == 0, drawn[-2000:]
    assert drawn.count("\x1b[1A") > 5 or drawn.count("\x1b[2K") > 5
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    for part in ("╭", "reel-nano", "0 of 3 done", "3 of 3 done", "KL nats/seq", "this movie"):
        assert part in text, part
    assert re.search(r"\d:\d\d left", text)
    assert re.search(r"[01]\.\d{3} +this movie", text)
    assert "final, over" in text and "Traceback" not in text
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l") >= 0


@pytest.fixture(scope="session")
def spoken(all_of, main_job, half_a_run, place) -> dict[str, Process]:
    """Everything that `sample`, `score` and `doctor` are asked to say."""
    out = main_job[1]
    return all_of(
        {
            "bundled": ["sample", "reel-nano", "-n", "3", "--prompt", "this movie"],
            "bundled_again": ["sample", "reel-nano", "-n", "3", "--prompt", "this movie"],
            "run": ["sample", out, "-n", "4"],
            "best": ["sample", out, "--checkpoint", "best", "-n", "1", "--seed", "3"],
            "by_number": ["sample", out, "--checkpoint", "0", "--prompt", "this film"],
            "score": ["score", "this movie wow", "i hated it"],
            "negative": ["score", "i hated it", "--direction", "neg"],
            "gold": ["score", "--reward-fn", "gold", "not a review"],
            "count": ["score", "--reward-fn", "count:a", "banana", "b"],
            "doctor": ["doctor"],
        },
        ("run", "doctor"),
    )


@pytest.mark.slow
def test_a_bundled_model_writes_reproducibly(spoken):
    done = spoken["bundled"]
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(line.startswith("this movie ") for line in lines)
    assert done.stdout == spoken["bundled_again"].stdout


def test_a_run_writes_samples_with_their_rewards(spoken):
    done = spoken["run"]
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +([01]\.\d{3}) +this movie", done.stdout, re.MULTILINE)
    assert len(rows) == 4


def test_the_best_checkpoint_and_any_numbered_one_can_be_asked(spoken):
    assert spoken["best"].returncode == 0, spoken["best"].stderr
    assert len(re.findall(r"^ +[01]\.\d{3} ", spoken["best"].stdout, re.MULTILINE)) == 1
    assert spoken["by_number"].returncode == 0, spoken["by_number"].stderr
    assert len(re.findall(r"[01]\.\d{3} +this film", spoken["by_number"].stdout)) == 5


def test_score_prints_reward_tab_text(spoken):
    done = spoken["score"]
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [text for _, text in rows] == ["this movie wow", "i hated it"]
    assert all(re.fullmatch(r"[01]\.\d{4}", reward) for reward, _ in rows)


def test_the_two_directions_add_up_to_one(spoken):
    positive = float(spoken["score"].stdout.splitlines()[1].split("\t")[0])
    negative = float(spoken["negative"].stdout.split("\t")[0])
    assert positive + negative == pytest.approx(1, abs=2e-4)
    assert negative > 0.5


def test_score_knows_the_rules_and_gold(spoken):
    assert spoken["gold"].stdout == "0.0000\tnot a review\n"
    assert spoken["count"].stdout == "3.0000\tbanana\n0.0000\tb\n"


def test_score_reads_lines_from_standard_input(cli):
    done = cli("score", "--reward-fn", "count:o", text="foo\n\nbar\n")
    assert (done.returncode, done.stdout) == (0, "2.0000\tfoo\n0.0000\tbar\n")


def test_the_doctor_finds_this_machine_well(spoken):
    done = spoken["doctor"]
    assert done.returncode == 0, done.stdout
    for part in ("torch", "transformer_lens", "device", "reel-nano", "wandb", "model hub"):
        assert part in done.stdout
    assert "WRONG" not in done.stdout and "Traceback" not in done.stderr


@pytest.fixture(scope="session")
def mistakes(all_of, main_job, half_a_run, place) -> dict[str, Process]:
    """Every mistake once."""
    out = main_job[1]
    (place / "no_run").mkdir()
    (place / "file").write_text("mine")
    corrupt = place / "corrupt"
    shutil.copytree(half_a_run, corrupt)
    raw = bytearray((corrupt / "checkpoints" / "last.safetensors").read_bytes())
    raw[-20] ^= 1
    (corrupt / "checkpoints" / "last.safetensors").write_bytes(raw)
    no_json = place / "no_json"
    shutil.copytree(half_a_run, no_json)
    (no_json / "run.json").write_text("{}")
    return all_of(
        {
            "no_command": [],
            "unknown_command": ["tran"],
            "unknown_flag": ["train", "--learning-rate", "3"],
            "not_a_number": ["train", "--batch-size", "many"],
            "out_of_range": ["train", "--top-p", "3"],
            "bad_combination": ["train", "--batch-size", "10", "--num-minibatches", "4"],
            "unknown_preset": ["train", "--preset", "real"],
            "preset_without_name": ["train", "--preset"],
            "unknown_device": [*SMALL, "--device", "abacus", "--out", place / "never"],
            "unknown_model": [*SMALL, "--base-model", "./nowhere", "--out", place / "never"],
            "unknown_reward": [*SMALL, "--reward-fn", "kindness", "--out", place / "never"],
            "unknown_word": [*SMALL, "--prefix", "this zebra", "--out", place / "never"],
            "beyond_context": [*SMALL, "--gen-len", "99", "--out", place / "never"],
            "wandb_login": [*SMALL, "--wandb-mode", "online", "--out", place / "never"],
            "out_occupied": [*SMALL, "--out", out],
            "out_is_a_file": [*SMALL, "--out", place / "file"],
            "out_below_a_file": [*SMALL, "--out", place / "file" / "run"],
            "resume_nothing": ["resume", place / "nowhere"],
            "resume_no_run": ["resume", place / "no_run"],
            "resume_corrupt": ["resume", corrupt],
            "resume_empty_json": ["resume", no_json],
            "sample_no_run": ["sample", place / "no_run"],
            "sample_no_checkpoint": ["sample", out, "--checkpoint", "7"],
            "sample_odd_checkpoint": ["sample", out, "--checkpoint", "worst"],
            "sample_none": ["sample", "reel-nano", "-n", "0"],
            "sample_cold": ["sample", "reel-nano", "--temperature", "0"],
            "sample_unknown_word": ["sample", "reel-nano", "--prompt", "this zebra"],
            "score_nothing": ["score"],
            "score_unknown": ["score", "a", "--reward-fn", "kindness"],
        },
        ("no_command", "unknown_flag", "bad_combination"),
    )


MISTAKES = {
    "no_command": ("train", "resume", "doctor"),
    "unknown_command": ("tran",),
    "unknown_flag": ("--learning-rate",),
    "not_a_number": ("--batch-size", "many"),
    "out_of_range": ("top_p=3.0", "at most 1"),
    "bad_combination": ("batch_size=10", "num_minibatches=4"),
    "unknown_preset": ("'real'", "reel, smol"),
    "preset_without_name": ("--preset",),
    "unknown_device": ("device='abacus'",),
    "unknown_model": ("./nowhere",),
    "unknown_reward": ("kindness", "sentiment"),
    "unknown_word": ("zebra",),
    "beyond_context": ("gen_len=99", "32"),
    "wandb_login": ("wandb_mode='online'", "wandb login", "offline"),
    "out_occupied": ("already holds a run", "resume"),
    "out_is_a_file": ("is a file", "--out"),
    "out_below_a_file": ("cannot write",),
    "resume_nothing": ("there is no directory",),
    "resume_no_run": ("no_run", "run.json"),
    "resume_corrupt": ("last.safetensors is corrupt",),
    "resume_empty_json": ("run.json",),
    "sample_no_run": ("no_run",),
    "sample_no_checkpoint": ("phase_000007", "there are", "best"),
    "sample_odd_checkpoint": ("worst", "there are"),
    "sample_none": ("n=0",),
    "sample_cold": ("temperature=0",),
    "sample_unknown_word": ("zebra",),
    "score_nothing": ("no text to score",),
    "score_unknown": ("kindness",),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_answered_in_one_sentence(mistakes, case):
    assert_one_sentence(mistakes[case], *MISTAKES[case])


def test_every_mistake_has_its_words(mistakes):
    assert mistakes.keys() == MISTAKES.keys()


def test_mistakes_write_nothing_and_harm_nothing(mistakes, main_job, place):
    assert not (place / "never").exists()
    assert (place / "file").read_text() == "mine"
    assert list((place / "no_run").iterdir()) == []
    assert len((main_job[1] / "metrics.jsonl").read_text().splitlines()) == 2
    load_checkpoint(main_job[1] / "checkpoints" / "last.safetensors")


def test_a_full_disk_at_the_start_is_one_sentence(cli, tmp_path):
    done = cli(*SMALL, "--out", tmp_path / "run", file_size=100_000)
    assert_one_sentence(done, "cannot write", "make room")
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_a_full_disk_in_mid_run_loses_nothing_that_was_saved(cli, half_a_run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(half_a_run, path)
    before = {p.name: p.read_bytes() for p in (path / "checkpoints").iterdir()}
    done = cli("resume", path, file_size=200_000)
    assert_one_sentence(done, "cannot write", "resume")
    assert {p.name: p.read_bytes() for p in (path / "checkpoints").iterdir()} == before
    again = RLHFTrainer.resume(path)
    assert again.phase == 1
    assert [report.phase for report in again.train()] == [1]


@contextlib.contextmanager
def reading(warm_python: WarmPython, arguments: list[str]) -> Iterator[tuple[IO, IO, WarmProcess]]:
    """A command's output and complaints as they come, and its process."""
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    with open(os.devnull) as nothing:
        files = (nothing.fileno(), out_end, err_end)
        process = warm_python.start(lab(arguments), files)
    os.close(out_end)
    os.close(err_end)
    with open(out) as said, open(err) as complained:
        yield said, complained, process


def test_a_reader_that_goes_away_costs_neither_a_traceback_nor_the_run(warm_python, tmp_path):
    """As in `train ... | head -1`: it ends well, or says how to go on."""
    arguments = [*SMALL, "--out", str(tmp_path / "run")]
    with reading(warm_python, arguments) as (said, complained, process):
        assert said.readline()
        said.close()
        complaint = complained.read()
        status = process.wait()
    assert "Traceback" not in complaint and "Exception ignored" not in complaint
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (status == 0 and "final" in info) or "resume" in complaint, (status, complaint)


def test_scores_into_a_pipe_that_is_closed_end_quietly(warm_python):
    arguments = ["score", "--reward-fn", "zero", "a", "b"]
    with reading(warm_python, arguments) as (said, complained, process):
        said.close()
        assert complained.read() == ""
        assert process.wait() == 0


def test_an_offline_wandb_run_works_from_end_to_end(cli, place, main_job):
    out = place / "mirrored"
    done = cli(*SMALL, "--out", out, "--wandb-mode", "offline", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr
    (log,) = (out / "wandb").glob("offline-run-*/run-*.wandb")
    assert log.stat().st_size > 1000
    assert not (place / "wandb").exists()
    assert "wandb_id" in json.loads((out / "run.json").read_text())
    mirrored, plain = (
        load_file(path / "checkpoints" / "last.safetensors") for path in (out, main_job[1])
    )
    assert all((mirrored[name] == plain[name]).all() for name in plain)


PROBED = (
    "train --preset reel --total-phases 4 --batch-size 128 --num-minibatches 2 --warmup-steps 1"
    " --seed 1"
).split()

KILLED = """
import os, signal, sys

import rlhf_lab.training
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer


class Killed(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

        @self.on("after_step")
        def die(ctx):
            if ctx.phase == 2:
                os.kill(os.getpid(), signal.SIGKILL)


rlhf_lab.training.RLHFTrainer = Killed
main(sys.argv[1:])
"""


@pytest.fixture(scope="session")
def watched(all_of, cli, warm_python, place) -> dict[str, Process]:
    """One run without probes, one with them, and one with them that is killed and resumed."""
    done = all_of(
        {
            "bare": [*PROBED, "--out", place / "bare"],
            "probed": [*PROBED, "--probes", "--out", place / "probed"],
        }
    )
    killed = warm_python.run(["-c", KILLED, *PROBED, "--probes", "--out", str(place / "broken")])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return done | {"broken": cli("resume", place / "broken")}


def test_probes_leave_the_weights_bit_for_bit_also_over_a_kill(watched, place):
    assert all(done.returncode == 0 for done in watched.values()), watched
    assert "going on with" in watched["broken"].stdout
    weights = {
        name: load_file(place / name / "checkpoints" / "last.safetensors") for name in watched
    }
    for name in ("probed", "broken"):
        assert weights[name].keys() == weights["bare"].keys()
        assert all((weights[name][key] == x).all() for key, x in weights["bare"].items())


def test_a_resumed_run_has_its_probes_again(watched, place):
    """A slow machine may thin a probe; the end of the run is always recorded."""
    whole, broken = Run(place / "probed"), Run(place / "broken")
    assert whole.probes() == broken.probes() and len(whole.probes()) == 8
    for name in whole.probes():
        one, other = ({r["phase"]: r for r in run.records(name)} for run in (whole, broken))
        assert all(one[phase] == other[phase] for phase in one.keys() & other.keys())
        assert len(broken.records(name)) == len(other)
    assert all(4 in broken.phases(name) for name in ("value_lens", "direction_sentiment"))
    assert all(check.ok for run in (whole, broken) for check in run.checks())


def test_probes_are_off_unless_asked_for_and_summed_up_at_the_end(watched, place):
    assert not (place / "bare" / "probes").exists()
    assert "probes" not in watched["bare"].stdout
    for name in ("probed", "broken"):
        checks = len(Run(place / name).checks())
        said = f"8 probes recorded; {checks} of {checks} identity checks hold; see python -m"
        assert said in watched[name].stdout


def test_the_report_shows_the_probes_of_a_run_that_asked_for_them(watched, cli, place):
    done = cli("report", place / "broken")
    assert done.returncode == 0, done.stderr
    page = (place / "broken" / "report.html").read_text(encoding="utf-8")
    assert all(f"<h3>{name}</h3>" in page for name in Run(place / "broken").probes())


def add(line: str) -> Callable[[Path], Any]:
    """Write a line below the others of a file."""
    return lambda path: path.write_text(path.read_text(encoding="utf-8") + line + "\n")


def become(text: str) -> Callable[[Path], Any]:
    """Write this, and nothing else, into a file."""
    return lambda path: path.write_text(text)


RECORDS, CHECKS = "probes/records", "probes/checks.jsonl"
DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no_arguments": ("run.json", become('{"args": {}}'), "holds no arguments"),
    "no_object": ("run.json", become("[1]"), "holds [1], not an object"),
    "curve_of_lists": ("metrics.jsonl", add('{"phase": 4, "mean_reward": [1]}'), "metrics.jsonl"),
    "list": ("metrics.jsonl", become("[1]\n"), "line 1, is [1], not an object"),
    "empty_sample": ("samples.jsonl", become("{}\n"), "line 1, has no field 'phase'"),
    "sample_in_words": (
        "samples.jsonl",
        become('{"phase": 0, "text": "a", "reward": "good"}\n'),
        "line 1, has reward='good'",
    ),
    "gold_in_words": (
        "samples.jsonl",
        become('{"phase": 0, "text": "a", "reward": 1.0, "gold_reward": "good"}\n'),
        "samples.jsonl does not hold",
    ),
    "suite_cut": ("probes/suite.json", become("{bad"), "suite.json is unreadable"),
    "suite_unnamed": ("probes/suite.json", become('{"probes": [{}]}'), "'name'"),
    "check_cut": (CHECKS, become('{"phase": 0}\n{"phase":\n'), "line 1, has no field 'probe'"),
    "check": (CHECKS, become('{"phase": 0, "probe": "x"}\n'), "line 1, has no field 'name'"),
    "note": ("probes/notes.jsonl", become('{"phase": 0}\n'), "line 1, has no field 'probe'"),
    "record_cut": (f"{RECORDS}/run_health.jsonl", become("{}\n"), "line 1, has no field 'phase'"),
    "record": (f"{RECORDS}/direction_sentiment.jsonl", become('{"phase": 0}\n'), "'accuracy'"),
    "tensors": (
        "probes/tensors/text_heatmap/phase_000000.safetensors",
        Path.unlink,
        "the tensors of probe 'text_heatmap' in phase 0, is missing; restore it",
    ),
}


@pytest.fixture(scope="session")
def damaged(watched, all_of, place) -> dict[str, Process]:
    """What the report says of one run, each time with another of its files spoilt."""
    for name, (file, spoil, _) in DAMAGE.items():
        path = place / "damaged" / name
        shutil.copytree(place / "probed", path, ignore=shutil.ignore_patterns("checkpoints"))
        spoil(path / file)
    return all_of({name: ["report", place / "damaged" / name] for name in DAMAGE})


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_reported_in_one_sentence_that_names_the_file(damaged, damage):
    file, _, words = DAMAGE[damage]
    assert_one_sentence(damaged[damage], f"{damage}/{file}", words)


def test_a_report_that_cannot_be_written_is_refused_with_the_remedy(main_job, cli, place):
    run, locked = main_job[1], place / "locked"
    locked.mkdir(mode=0o500)
    for out in (".", "checkpoints"):
        done = cli("report", run, "--out", out, cwd=run)
        assert_one_sentence(done, f"--out {out} is a directory; name a file", "report.html")
    if not os.access(locked, os.W_OK):
        done = cli("report", run, "--out", locked / "page.html")
        assert_one_sentence(done, "cannot write", "choose another --out.")
