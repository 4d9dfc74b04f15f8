"""One number for each phase, in all that a reader sees: the terminal, the panel and the page."""

import html
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.terminal import on_a_terminal, screen

TOTAL, LONGER = 3, 5
SMALL = "--batch-size 8 --num-minibatches 2 --warmup-steps 0 --base-lr 0 --head-lr 0 --gen-len 26"
TRAIN = f"train --total-phases {TOTAL} {SMALL} --out".split()
"""Nothing learns, so that there is a remark."""
SIZES = [(80, 24), (100, 24)]


class Seen(NamedTuple):
    """What a reader of one run has seen, the run's directory, and how many phases it has."""

    run: Path
    total: int
    said: dict[str, str]
    page: str


@pytest.fixture(scope="module", params=["trained", "extended"])
def seen(request, warm_python, tmp_path_factory) -> Seen:
    """A run without a terminal, its samples, page and card; and then the same run made longer."""
    run, total, said = tmp_path_factory.mktemp("numbers") / "run", TOTAL, {}
    commands = [[*TRAIN, str(run)]]
    if request.param == "extended":
        total = LONGER
        commands.append(["resume", str(run), "--total-phases", str(LONGER)])
    commands += [["sample", str(run), "--checkpoint", "2"], ["report", str(run)]]
    for command in commands:
        done = warm_python.run(["-m", "rlhf_lab", *command])
        assert done.returncode == 0, done.stderr
        said[command[0]] = done.stdout + done.stderr
    said["card"] = (run / "README.md").read_text(encoding="utf-8")
    return Seen(run, total, said, (run / "report.html").read_text(encoding="utf-8"))


def lines_of(run: Path, file: str) -> list[dict]:
    return [json.loads(line) for line in (run / file).read_text(encoding="utf-8").splitlines()]


def assert_names_phases(text: str, total: int) -> None:
    """Numbers behind the word are those of phases, without a count behind them."""
    named = re.findall(r"\bphases? (\d+)(?!\d)(?! phases)", text, re.IGNORECASE)
    assert all(int(number) < total for number in named), named
    assert not re.search(r"phase \d+ ?(/|of \d)", text, re.IGNORECASE)


def test_every_number_of_a_phase_is_one_of_the_files(seen):
    assert [line["phase"] for line in lines_of(seen.run, "metrics.jsonl")] == [*range(seen.total)]
    for text in (*seen.said.values(), html.unescape(seen.page)):
        assert_names_phases(text, seen.total)


def test_the_line_of_a_phase_has_the_figures_that_the_files_have_under_its_number(seen):
    metrics = {line["phase"]: line for line in lines_of(seen.run, "metrics.jsonl")}
    said = seen.said["train"] + seen.said.get("resume", "")
    shown = re.findall(r"^phase (\d+) \| reward (\S+) .*\| entropy (\S+) ", said, re.MULTILINE)
    assert [int(number) for number, *_ in shown] == [*range(seen.total)]
    for number, reward, entropy in shown:
        line = metrics[int(number)]
        assert (reward, entropy) == tuple(
            f"{line[name]:.3f}" for name in ("mean_reward", "entropy_per_token")
        )


def test_samples_stand_under_the_number_that_they_have_in_the_files(seen):
    texts: dict[int, list[str]] = {}
    for sample in lines_of(seen.run, "samples.jsonl"):
        texts.setdefault(sample["phase"], []).append(sample["text"])
    said = seen.said["train"] + seen.said.get("resume", "")
    titled = re.findall(r"^samples of phase (\d+).*:\n +\S+ +(.*)$", said, re.MULTILINE)
    ends = {"0", str(TOTAL - 1), str(seen.total - 1)}
    assert {number for number, _ in titled} - {str(TOTAL)} == ends
    assert all(text in texts[int(number)] for number, text in titled)
    page = html.unescape(seen.page)
    for title, number in (
        ("Phase 0, before learning", 0),
        (f"Final samples, after {seen.total} learning phases", seen.total),
    ):
        under = page.split(f"<h3>{title}</h3>")[1].split("<h3>")[0]
        assert sum(text in under for text in texts[number]) == 6


def test_what_is_remarked_and_noted_is_of_the_same_number_everywhere(seen):
    (remark,) = json.loads((seen.run / "run.json").read_text())["remarks"].values()
    assert remark["phase"] == 0
    assert f"phase 0: {remark['text']}" in seen.said["train"].splitlines()
    assert f"since phase 0: {remark['text']}" in html.unescape(seen.page)
    assert f"{seen.total} of {seen.total}" in re.sub(r"<[^>]+>", " ", seen.page)
    assert f"phase {seen.total - 1} |" in seen.said["card"]


def test_a_run_goes_on_at_the_phase_after_those_that_are_done(seen):
    if "resume" not in seen.said:
        pytest.skip("this run was not resumed")
    lines = seen.said["resume"].splitlines()
    assert f"going on with {seen.run} at phase {TOTAL}" in lines
    assert (
        f"{LONGER} phases, numbered 0 to {LONGER - 1}; KL in nats per sequence, "
        in seen.said["resume"]
    )
    first = next(line for line in lines if line.startswith("phase "))
    assert first.startswith(f"phase {TOTAL} | ")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_panel_counts_what_is_done_and_names_what_it_shows(
    warm_python, surroundings, tmp_path, width, height
):
    run, size = tmp_path / "run", {"width": width, "height": height}
    for total, arguments in (
        (TOTAL, [*TRAIN, str(run)]),
        (LONGER, ["resume", str(run), "--total-phases", str(LONGER)]),
    ):
        command = ["-m", "rlhf_lab", *arguments]
        status, drawn = on_a_terminal(warm_python, command, surroundings, **size)
        assert status == 0, drawn[-2000:]
        done = {int(n) for n in re.findall(rf"(\d+) of {total} done", drawn)}
        first = 0 if total == TOTAL else TOTAL
        assert {first, total} <= done <= {*range(first, total + 1)}
        doing = {int(n) for n in re.findall(r"phase (\d+): [a-z]", drawn)}
        assert doing <= {*range(total)} and first in doing
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
        assert_names_phases(plain, total)
        gone, rows = screen(drawn, width, height)
        picture = "\n".join([*gone, *rows]).split("╭")[-1].split("╰")[0]
        assert "\n".join([*gone, *rows]).count("╭") == 1  # each is drawn over the one before
        assert f"{total} of {total} done" in picture and picture.count("\n") < height
        last = lines_of(run, "metrics.jsonl")[-1]
        for label, name in (
            ("clip fraction", "clip_fraction"),
            ("explained variance", "explained_variance"),
        ):
            assert re.search(rf"{label} +\S+ to {last[name]:z.3f} ", picture), label
        for label, name in (
            ("approx KL nats/tok", "approx_kl_per_token"),
            ("value loss", "value_loss"),
            ("learning rate", "base_lr"),
            ("learning rate, head", "head_lr"),
        ):
            assert re.search(rf"{label} +\S+ to {re.escape(f'{last[name]:.3g}')} ", picture), label
        written = [s["text"] for s in lines_of(run, "samples.jsonl") if s["phase"] == total - 1]
        shown = re.sub(r"[\s│]+", " ", picture.split(f"sample of phase {total - 1} ")[1])
        assert f"{' '.join(written[0].split())} " in shown
