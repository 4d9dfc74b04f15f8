"""Programs and commands of README and docs/running.md run as promised."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rlhf_lab.__main__ import parse
from tools.prose import page, quoted, rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + page("running")
NEEDS_HUB_OR_FILES = ("gpt2-medium", "path/to")
MAKERS = ("python -m tools.", "python -m benchmarks")  # run from the repository's root
FEWER = {
    "train": "--total-phases 2 --batch-size 16 --num-minibatches 2 --warmup-steps 1",
    "resume": "--total-phases 3",
    "compare": "--n-texts 4 --methods split",
    "train-reward": "--steps 2 --n-pairs 40",
    "sft": "--steps 2 --n-texts 40 --samples 8",
    "check": "--reviews 300",
} | dict.fromkeys(("dpo", "kto", "orpo"), "--steps 2 --n-pairs 40 --samples 8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES, flags=re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("console") for line in block.splitlines() if line]


def lab_commands() -> list[str]:
    return [line for line in commands() if line.startswith(("python -m rlhf_lab", *MAKERS))]


def printed(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_numbers_and_words(output: str) -> list[str]:
    """Phase lines with their numbers blanked; token lines as a bare count of tokens."""
    shapes = []
    for line in output.strip().splitlines():
        tokens = re.findall(r"\S+:\d\.\d\d", line)
        shapes.append(f"{len(tokens)} tokens" if tokens else re.sub(r"\d+\.\d+", "N", line))
    return shapes


def test_the_short_program_prints_what_the_readme_shows(tmp_path, warm_python):
    program, shown = blocks("python")[0], blocks("text")[0]
    output = printed(warm_python.run(["-c", program], cwd=tmp_path))
    assert without_numbers_and_words(output) == without_numbers_and_words(shown)
    assert all(token.endswith(":0.00") for token in output.splitlines()[0].split())


@pytest.mark.nightly
def test_every_identity_check_of_the_probes_holds(tmp_path, warm_python):
    lines = printed(warm_python.run(["-c", blocks("python")[1]], cwd=tmp_path)).splitlines()
    assert len(lines) > 10
    assert [line for line in lines if not line.endswith(" True")] == []


def test_the_commands_run_in_the_order_of_the_readme(tmp_path, warm_python):
    """As they are in `make nightly`, and with fewer and smaller steps in `make test`."""
    runnable = [c for c in lab_commands() if not any(word in c for word in NEEDS_HUB_OR_FILES)]
    assert len(runnable) >= 6
    for command in runnable:
        cwd = ROOT if command.startswith(MAKERS) else tmp_path
        arguments = shlex.split(command)[1:]
        fewer = "" if os.environ.get("RLHF_LAB_NIGHTLY") else FEWER.get(arguments[2], "")
        printed(warm_python.run([*arguments, *fewer.split()], cwd=cwd))
    assert (tmp_path / "runs" / "demo" / "checkpoints" / "best.safetensors").is_file()


def test_the_breakpoint_of_the_readme_stops_where_the_metrics_page_says(tmp_path, warm_python):
    """A newcomer's route: README, the page of metrics, a breakpoint, one phase of the main job."""
    (command,) = [c for c in commands() if c.startswith("python -m pdb")]
    assert "](docs/metrics.md)" in README.split(command)[0]
    (where,) = [quoted(row[2])[0] for row in rows(page("metrics"), 3) if row[0] == "`kl_penalty`"]
    assert f"`kl_penalty`: `{where}`" in README.split(command)[0]
    words = shlex.split(command)[1:]
    begun = words.index("continue") + 1
    words[begun:begun] = ["-c", "where", "-c", "p kl.shape", "-c", "quit"]
    done = warm_python.run([*words, "--out", str(tmp_path / "run")], cwd=ROOT)
    stops = ["learning_phase", "objective_terms", "kl_penalty", where.split(".")[1]]
    path = re.findall(r"\.py\(\d+\)(\w+)\(\)", done.stdout)
    assert [name for name in path if name in stops][-4:] == stops
    assert re.search(r"torch\.Size\(\[\d+, \d+\]\)", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in lab_commands() if not c.startswith(MAKERS)])
def test_every_command_is_one_the_command_line_knows(command):
    parse(shlex.split(command)[3:])
