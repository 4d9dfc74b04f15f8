"""The view of a run, on consoles that record what they are given."""

import io
import re
import sys
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import Cost, LearningStats, PhaseReport, RLHFTrainer, RolloutStats
from rlhf_lab.views import RunView, live
from rlhf_lab.views.live import hours_minutes_seconds
from rlhf_lab.views.panel import Display
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "monotonic", clock)
    return clock


@pytest.fixture
def trainer(tmp_path) -> RLHFTrainer:
    args = RLHFArgs(
        preset="reel",
        total_phases=4,
        batch_size=8,
        num_minibatches=2,
        batches_per_learning_phase=2,
        warmup_steps=1,
        gen_len=6,
    )
    return RLHFTrainer(args, out=tmp_path / "run")


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False)


def terminal() -> Console:
    return Console(
        file=io.StringIO(), width=110, height=40, force_terminal=True, color_system="truecolor"
    )


def drawn(view: RunView) -> str:
    """The panel as it is now, as plain text."""
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(view.panel())
    return console.file.getvalue()


SHOWN = {
    "reward": ("mean_reward", ".3f"),
    "true reward": ("true_reward", ".3f"),
    "grammatical": ("grammatical_fraction", ".3f"),
    "KL nats/seq": ("kl_per_sequence", "z.3f"),
    "entropy nats/tok": ("entropy_per_token", ".3f"),
    "clip fraction": ("clip_fraction", ".3f"),
    "approx KL nats/tok": ("approx_kl_per_token", ".3g"),
    "explained variance": ("explained_variance", "z.3f"),
    "value loss": ("value_loss", ".3g"),
    "learning rate": ("base_lr", ".3g"),
    "learning rate, head": ("head_lr", ".3g"),
}
"""The rows of the panel: their labels, their names in metrics.jsonl, and their formats."""
LONG = "this movie anyway , " + "the plot was so good and the music was rather charming but " * 2


def report(phase: int, **figures: float | None) -> PhaseReport:
    """A report with these figures, and any numbers for the others."""
    figures = {
        "phase": phase,
        "base_lr": 3e-4,
        "head_lr": 3e-3,
        "kl_coef": 0.1,
        "mean_reward": 0.5,
        "true_reward": 0.5,
        "grammatical_fraction": 0.5,
        "explained_variance": 0.5,
        "peak_memory_bytes": 1,
    } | figures

    def filled(kind: type, **parts: object) -> object:
        needed = {f.name for f in fields(kind) if f.default is MISSING} - parts.keys()
        known = {f.name for f in fields(kind)} & figures.keys()
        return kind(**(parts | dict.fromkeys(needed, 0.25) | {n: figures[n] for n in known}))

    parts = {"rollout": RolloutStats, "learning": LearningStats, "cost": Cost}
    return filled(PhaseReport, **{name: filled(kind) for name, kind in parts.items()})


def picture(width: int, height: int, **changes: object) -> str:
    """A panel of three phases as a terminal of this size shows it, as plain text."""
    shown = {
        "title": "rlhf_lab",
        "subtitle": "runs/demo",
        "done": 3,
        "total": 20,
        "left": "0:17 left",
        "doing": "phase 3: learning, step 12/16",
        "reports": [report(n, mean_reward=n / 2) for n in range(3)],
        "samples": [(LONG + str(n), n / 5) for n in range(5)],
        "sampled_in": 3,
        "prompt": "this movie",
        "diagnostics": [],
    }
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(Display(**(shown | changes)))
    return console.file.getvalue()


def ticking(trainer: RLHFTrainer, clock: Clock, seconds: float) -> None:
    """Each phase takes so long; registered before the view, so that the view sees it."""

    @trainer.on("after_rollout")
    def pass_time(ctx):
        clock.now += seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0:00"),
        (42.4, "0:42"),
        (59.6, "1:00"),
        (61.0, "1:01"),
        (3599.7, "1:00:00"),
        (3800.0, "1:03:20"),
        (90000.0, "25:00:00"),
    ],
)
def test_durations_read_like_a_clock(seconds, text):
    assert hours_minutes_seconds(seconds) == text


@pytest.mark.slow
def test_without_a_terminal_there_is_a_line_per_phase_and_samples_at_both_ends(trainer):
    console = plain_console()
    with RunView(trainer, console):
        reports = trainer.train()
    lines = console.file.getvalue().splitlines()
    of_phases = [line for line in lines if line.startswith("phase ")]
    assert all(len(line) <= 100 for line in of_phases)
    assert [line.split(" | ")[0] for line in of_phases] == [f"phase {n}" for n in (0, 1, 2, 3)]
    assert "4 phases, numbered 0 to 3; KL in nats per sequence, entropy in nats per token" in lines
    for line, report in zip(of_phases, reports, strict=True):
        assert f"reward {report.mean_reward:.3f}" in line
        assert f"true {report.true_reward:.3f}" in line
        assert f"KL {report.kl_per_sequence:.3f}" in line
        assert f"entropy {report.entropy_per_token:.3f}" in line
    titles = [line for line in lines if line.startswith("samples of phase")]
    assert titles == ["samples of phase 0, before learning:", "samples of phase 3:"]
    samples = [line for line in lines if "this movie" in line]
    assert len(samples) == 10
    first = trainer.run.read("samples.jsonl")[0]
    assert samples[0] == f"  {first['reward']:6.3f}  {first['text']}"
    assert "\x1b" not in console.file.getvalue()


@pytest.mark.slow
def test_the_lines_say_what_is_left_at_the_pace_so_far(trainer, clock):
    """Four phases of 10 s each: 30, 20, 10 and 0 seconds left."""
    ticking(trainer, clock, 10)
    console = plain_console()
    with RunView(trainer, console):
        trainer.train()
    left = re.findall(r"\| (\S+) left", console.file.getvalue())
    assert left == ["0:30", "0:20", "0:10", "0:00"]


@pytest.mark.slow
def test_remaining_time_is_pace_times_phases_left(trainer, clock):
    """After 2 of 4 phases of 10 s, 20 s are left; 10 s later, with nothing done, it is 30 s."""
    ticking(trainer, clock, 10)
    view = RunView(trainer, plain_console())
    phases = iter(trainer)
    with view:
        assert view.remaining_seconds() is None
        next(phases)
        assert view.remaining_seconds() == pytest.approx(30)
        next(phases)
        assert view.remaining_seconds() == pytest.approx(20)
        clock.now += 10
        assert view.remaining_seconds() == pytest.approx(30)


@pytest.mark.slow
def test_a_resumed_run_reckons_with_its_own_phases_only(trainer, clock):
    """Resumed at phase 2 of 4; one phase of 10 s, so 10 s are left."""
    for _ in range(2):
        trainer.run_phase()
    again = RLHFTrainer.resume(trainer.run.path)
    ticking(again, clock, 10)
    console = plain_console()
    view = RunView(again, console)
    with view:
        next(iter(again))
        assert view.remaining_seconds() == pytest.approx(10)
    assert "phase 2 | " in console.file.getvalue() and "phase 3" not in console.file.getvalue()
    assert "3 of 4 done" in drawn(view) and "sample of phase 2" in drawn(view)


@pytest.mark.slow
def test_the_panel_shows_progress_curves_samples_and_where_it_writes(trainer, clock):
    ticking(trainer, clock, 10)
    view = RunView(trainer, terminal())
    phases = iter(trainer)
    with view:
        assert "0 of 4 done" in drawn(view) and "phase 0: starting" in drawn(view)
        reports = [next(phases), next(phases)]
        picture = drawn(view)
    for part in ("reel-nano", "reward sentiment", "2 of 4 done", "0:20 left", "phase 2: sampling"):
        assert part in picture, part
    for label, (name, form) in SHOWN.items():
        first, last = (format(getattr(report, name), form) for report in reports)
        assert re.search(rf"│ +{label} +{first} to {last} +[▁█]{{2}} ", picture), label
    assert "sample of phase 1" in picture
    newest = [line for line in trainer.run.read("samples.jsonl") if line["phase"] == 1]
    for sample in newest[:5]:
        assert re.search(rf"{sample['reward']:.3f} +{re.escape(sample['text'])}", picture)
    assert trainer.run.path.name in picture


@pytest.mark.slow
def test_the_panel_says_which_half_and_step_it_is_in(trainer):
    view = RunView(trainer, terminal())
    seen = []
    for event in ("after_rollout", "after_score", "after_step", "after_phase", "run_end"):
        trainer.on(event)(lambda ctx: seen.append(drawn(view)) if ctx.phase in (0, 4) else None)
    with view:
        trainer.train()
    doing = ["scoring", "learning", *(f"learning, step {n}/4" for n in (1, 2, 3, 4))]
    doing = [*(f"phase 0: {words} " for words in doing), "phase 1: sampling", "4 of 4 done"]
    for words, picture in zip(doing, seen, strict=True):
        assert words in picture


@pytest.mark.slow
def test_the_panel_counts_a_phase_as_done_when_its_report_is_there(trainer, clock):
    """What is drawn while the next batch is sampled must not lag a phase behind."""
    ticking(trainer, clock, 10)
    view = RunView(trainer, terminal())
    seen = []
    trainer.on("after_phase")(lambda ctx: seen.append(drawn(view)))
    with view:
        trainer.train()
    for number, picture in enumerate(seen, start=1):
        assert f"{number} of 4 done" in picture
        assert f"sample of phase {number - 1}" in picture
        assert f"0:{10 * (4 - number):02} left" in picture


@pytest.mark.slow
def test_under_a_debugger_lines_are_printed_so_that_its_prompt_stays(trainer, monkeypatch):
    console = terminal()
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    with RunView(trainer, console) as view:
        trainer.train()
    assert view._live is None
    assert "samples of phase 0" in console.file.getvalue()


@pytest.mark.slow
def test_on_a_terminal_the_panel_is_drawn_and_no_lines_are_printed(trainer):
    console = terminal()
    with RunView(trainer, console):
        trainer.train()
    output = console.file.getvalue()
    assert "\x1b[" in output and "╭" in output and "4 of 4 done" in output
    assert "before learning" not in output and " | reward" not in output


@pytest.mark.slow
def test_a_policy_without_true_reward_has_no_row_for_it(trainer):
    trainer.rewards.true_reward_fn, trainer.rewards.check_grammar = None, False
    console = plain_console()
    view = RunView(trainer, console)
    with view:
        next(iter(trainer))
    assert "grammatical" not in drawn(view) and not re.search(r"true reward +\d", drawn(view))
    assert "reward 0." in console.file.getvalue() and "true " not in console.file.getvalue()


@pytest.mark.slow
def test_watching_changes_no_weights(trainer, tmp_path):
    unwatched = RLHFTrainer(trainer.args, out=tmp_path / "unwatched")
    unwatched.train()
    with RunView(trainer, terminal()):
        trainer.train()
    for a, b in zip(trainer.policy.parameters(), unwatched.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_terminal_usable(trainer):
    console = terminal()
    with pytest.raises(ZeroDivisionError), RunView(trainer, console) as view:
        next(iter(trainer))
        raise ZeroDivisionError
    assert view._live is not None and not view._live.is_started
    assert console.file.getvalue().count("\x1b[?25l") == console.file.getvalue().count("\x1b[?25h")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[red]x[/red]", "[red]x[/red]"),
        ("a [/] b", "a [/] b"),
        (":smile: [b]", ":smile: [b]"),
        ("a\x1b[2Jb\u202ec", r"a\x1b[2Jb\u202ec"),
    ],
)
def test_texts_and_names_are_shown_as_they_are(tmp_path, text, shown):
    args = RLHFArgs(preset="reel", batch_size=4, num_minibatches=1, gen_len=4)
    trainer = RLHFTrainer(args, out=tmp_path / text)
    trainer.start()
    view = RunView(trainer, plain_console())
    view.rollout = SimpleNamespace(texts=[f"this movie {text}."], raw_rewards=torch.tensor([1.0]))
    trainer.args = replace(trainer.args, base_model=f"model {text}")
    console = Console(file=io.StringIO(), width=300, color_system="truecolor", force_terminal=True)
    console.print(view.panel())
    picture = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert f"{tmp_path}/{shown} " in picture  # of the run
    assert f"rlhf_lab  model {shown}  reward" in picture
    assert f"{shown}." in picture


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 24), (100, 40), (60, 24), (140, 50)])
@pytest.mark.parametrize(
    "diagnostics", [[], ["since phase 1: the policy is far from the reference " * 2]]
)
@pytest.mark.parametrize("grouped", [None, 0.125])
def test_as_many_samples_are_shown_as_are_whole_in_the_height(width, height, diagnostics, grouped):
    reports = [report(n, uninformative_group_fraction=grouped) for n in range(30)]
    given = {"diagnostics": diagnostics, "reports": reports}
    lines = picture(width, height, **given).splitlines()
    assert len(lines) <= height and {cell_len(line) for line in lines} == {width}
    unwrapped = re.sub(r"[\s│]+", " ", "".join(lines))
    count = sum(f"charming but {n}" in unwrapped for n in range(5))
    assert f"{0.2 * (count - 1):.3f} this" in unwrapped and count > 0
    assert f"{0.2 * count:.3f} this" not in unwrapped
    assert all(text.strip() in unwrapped for text in diagnostics)
    assert ("uninformative 0.125" in unwrapped) == (grouped is not None)
    if count < 5:
        higher = picture(width, 200, samples=[(LONG + "x", 0.0)] * (count + 1), **given)
        assert len(higher.splitlines()) > height


@pytest.mark.parametrize("width", [80, 100])
def test_every_number_and_its_curve_is_whole_at_usual_widths(width):
    """Also the longest: 0.000123 to 4.56e-05, and -164208.4, beside forty phases."""
    reports = [report(n, value_loss=0.000123, approx_kl_per_token=n / 40) for n in range(40)]
    reports[-1] = report(40, value_loss=0.0000456, explained_variance=-164208.4)
    shown = picture(width, 24, reports=reports)
    assert re.search(r"value loss +0.000123 to 4.56e-05 +[▁█]+ ", shown)
    assert re.search(r"explained variance +0.500 to -1.64e\+05 +[▁█]+ ", shown)
    assert re.search(r"approx KL nats/tok +0 to 0.25 +[▁▂▃▄▅▆▇█]{31,}", shown)
    assert re.search(r"learning rate, head +0.003 to 0.003 ", shown)
    assert "…" not in shown
    assert re.search(r"3 of 20 done +[━╸╺]+ +0:17 left +phase 3: learning, step 12/16", shown)


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60])
def test_a_narrow_panel_keeps_its_frame_and_the_newest_numbers(width):
    reports = [report(n, mean_reward=0.125 * (n + 1)) for n in range(3)]
    shown = picture(width, 24, reports=reports)
    assert {cell_len(line) for line in shown.splitlines()} == {width}
    assert re.search(r"reward .*0\.375", shown) or width == 20
    assert ("0.125 to 0.375" in shown) == (width >= 50)
    assert "3 of 20 done" in shown or width == 20


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.25, float("nan"), 0.5], "0.250 to 0.500  ▁█ "),
        ([0.25, 0.5, float("nan")], "0.250 to nan  ▁█ "),
        ([float("nan")], "nan to nan  "),
        ([None, 0.25], "– to 0.250  ▁ "),
        ([0.25, None], "0.250 to –  ▁ "),
        ([-float("inf"), 0.25], "-inf to 0.250  ▁ "),
        ([-0.0001, -0.0001], "0.000 to 0.000  ▁▁ "),
        ([1e38, -1e38], "1e+38 to -1e+38  █▁ "),
    ],
)
def test_numbers_that_are_not_known_or_not_finite(values, shown):
    reports = [report(n, true_reward=value) for n, value in enumerate(values)]
    assert re.search(rf"true reward +{re.escape(shown)}", picture(100, 24, reports=reports))


def test_what_is_never_known_has_no_row():
    reports = [report(n, true_reward=None) for n in range(3)]
    shown = picture(100, 24, reports=reports)
    assert "true reward" not in shown and "uninformative" not in shown and "value loss" in shown


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"uninformative_group_fraction": 0.25},
        {"true_reward": None, "grammatical_fraction": None},
        {"mean_reward": -123456.0, "kl_per_sequence": 1e30, "entropy_per_token": 1e-9},
        {"mean_reward": float("nan"), "explained_variance": float("-inf")},
    ],
)
def test_a_line_has_at_most_a_hundred_columns(trainer, figures):
    """A policy that no truth is known of has room for what it learns."""
    view = RunView(trainer, plain_console())
    line = view._line(report(1234, **figures))
    assert len(line) <= 100 and line.startswith("phase 1234 | reward ")
    assert " | KL " in line and line.endswith(" left")
    assert " | entropy " in line or "1e+30" in line
    assert ("clip fraction" in line) == (" | true " not in line)


@pytest.mark.slow
def test_steps_beyond_the_last_phase_are_shown_with_no_time_left(trainer, clock):
    ticking(trainer, clock, 10)
    view = RunView(trainer, terminal())
    with view:
        trainer.train()
        trainer.run_phase()
        assert "5 of 4 done" in drawn(view) and "0:00 left" in drawn(view)
