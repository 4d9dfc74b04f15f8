"""The view of a run, on consoles that record what they are given."""

import io
import re
import sys

import pytest
import torch
from rich.console import Console

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views import RunView, live
from rlhf_lab.views.live import hours_minutes_seconds
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
    assert [line.split(" | ")[0] for line in of_phases] == [f"phase {n}/4" for n in (1, 2, 3, 4)]
    for line, report in zip(of_phases, reports, strict=True):
        assert f"reward {report.mean_reward:.3f}" in line
        assert f"gold {report.gold_reward:.3f}" in line
        assert f"KL nats/seq {report.kl_per_sequence:.3f}" in line
        assert f"entropy nats/tok {report.entropy_per_token:.3f}" in line
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
    assert "phase 3/4" in console.file.getvalue()


@pytest.mark.slow
def test_the_panel_shows_progress_curves_samples_and_where_it_writes(trainer, clock):
    ticking(trainer, clock, 10)
    view = RunView(trainer, terminal())
    phases = iter(trainer)
    with view:
        assert "phase 0/4" in drawn(view) and "starting" in drawn(view)
        reports = [next(phases), next(phases)]
        picture = drawn(view)
    for part in ("reel-nano", "reward sentiment", "phase 2/4", "0:20 left", "sampling"):
        assert part in picture, part
    for label, name in (("reward", "mean_reward"), ("gold", "gold_reward")):
        first, last = (f"{getattr(report, name):.3f}" for report in reports)
        assert re.search(rf"{label} +{first} to {last} +[▁█]{{2}}", picture), label
    for label in ("grammatical", "KL nats/seq", "entropy nats/tok"):
        assert label in picture
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
    doing = ["scoring", "learning", *(f"learning, step {n}/4" for n in (1, 2, 3, 4)), "sampling"]
    for words, picture in zip([*doing, "done"], seen, strict=True):
        assert words in picture
    assert "phase 4/4" in seen[-1]


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
        assert f"phase {number}/4" in picture
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
    assert "\x1b[" in output and "╭" in output and "phase 4/4" in output
    assert "before learning" not in output and " | reward" not in output


@pytest.mark.slow
def test_a_policy_without_gold_has_no_row_for_it(trainer):
    trainer.rewards.gold_fn, trainer.rewards.check_grammar = None, False
    console = plain_console()
    view = RunView(trainer, console)
    with view:
        next(iter(trainer))
    assert "grammatical" not in drawn(view) and not re.search(r"gold +\d", drawn(view))
    assert "reward 0." in console.file.getvalue() and "gold" not in console.file.getvalue()


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


def test_the_panel_takes_no_markup_from_names(tmp_path):
    args = RLHFArgs(preset="reel", batch_size=4, num_minibatches=1, gen_len=4)
    trainer = RLHFTrainer(args, out=tmp_path / "[bold]" / "[" / "red]")
    trainer.start()
    console = Console(file=io.StringIO(), width=300, color_system=None)
    console.print(RunView(trainer, console).panel())
    assert "/[bold]/[/red]" in console.file.getvalue()
