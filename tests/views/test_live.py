"""The view of a run, on consoles that record what they are given."""

import io
import re
import signal
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views import RunView, live, sample_table, sparkline
from rlhf_lab.views.live import CURVES, reward_color
from rlhf_lab.views.templates import formatted
from rlhf_lab.views.terminal import train_on_terminal

LONG = "this movie anyway , " + "the plot was so good and the music was rather charming but " * 2
ORANGE, MIDDLE, BLUE = "rgb(213,94,0)", "rgb(106,104,89)", "rgb(0,114,178)"


class Clock:
    """Time that passes only when a test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "monotonic", clock)
    return clock


@pytest.fixture
def trainer(tmp_path, clock) -> RLHFTrainer:
    """Four phases of 10 seconds."""
    sizes = {"batch_size": 8, "num_minibatches": 2, "batches_per_learning_phase": 2, "gen_len": 6}
    args = RLHFArgs(preset="reel", total_phases=4, warmup_steps=1, **sizes)
    return take_time(RLHFTrainer(args, out=tmp_path / "run"), clock)


def take_time(trainer: RLHFTrainer, clock: Clock) -> RLHFTrainer:
    trainer.on("after_rollout")(lambda ctx: setattr(clock, "now", clock.now + 10))
    return trainer


def console(width: int = 110, height: int = 40, is_terminal: bool = False) -> Console:
    colors = "truecolor" if is_terminal else None
    size = {"width": width, "height": height, "color_system": colors}
    return Console(file=io.StringIO(), force_terminal=is_terminal, **size)


def drawn(view: RunView, width: int = 110, height: int = 40) -> str:
    """The panel as it is now, as plain text."""
    out = console(width, height)
    out.print(view)
    return out.file.getvalue()


def panel(width: int, height: int, diagnostics: tuple[str, ...] = (), **metrics: list) -> str:
    """A panel with these values of metrics, three of the reward and five samples."""
    recorder = SimpleNamespace(diagnostics={x: {"phase": 1, "text": x} for x in diagnostics})
    args = RLHFArgs(preset="reel", prefix="this movie")
    parts = {"args": args, "recorder": recorder, "phase": 0, "run": None, "device": "cpu"}
    view = RunView(MagicMock(spec=RLHFTrainer, custom_components=(), **parts), console())
    values = {"reward": [0.125, 0.25, 0.375]} | metrics
    view.metrics = [
        {label: column[min(i, len(column) - 1)] for label, column in values.items()}
        for i in range(max(map(len, values.values())))
    ]
    view.samples = [(LONG + str(n), n / 5) for n in range(5)]
    return drawn(view, width, height)


@pytest.mark.slow
def test_without_a_terminal_there_is_a_line_per_phase_and_samples_at_both_ends(trainer):
    out, reports, before = console(200), [], signal.getsignal(signal.SIGTERM)
    trainer.on("after_phase")(lambda ctx: reports.append(ctx.report))
    assert train_on_terminal(trainer, out) == 0 and signal.getsignal(signal.SIGTERM) is before
    lines = out.file.getvalue().splitlines()
    assert "4 phases, numbered 0 to 3; KL in nats per sequence, entropy in nats per token" in lines
    phases = [line for line in lines if line.startswith("phase ")]
    numbers = "reward {:.4g} | true {:.4g} | grammatical {:.4g} | KL {:z.4g} | entropy {:.4g}"
    for n, (line, report) in enumerate(zip(phases, reports, strict=True)):
        values = [getattr(report, name) for name, _ in CURVES[:4]] + [report.entropy_per_token]
        assert line == f"phase {n} | {numbers.format(*values)} | 0:00:{30 - 10 * n:02} left"
    titles = [line for line in lines if line.startswith("samples of phase")]
    assert titles == ["samples of phase 0, before learning:", "samples of phase 3:"]
    samples, stored = ([x for x in lines if "this movie" in x], trainer.run.read("samples.jsonl"))
    last = [x for x in stored if x["phase"] == 3]
    assert samples == [f"  {x['reward']:6.3f}  {x['text']}" for x in [*stored[:5], *last[:5]]]
    assert "\x1b" not in out.file.getvalue()


@pytest.mark.slow
def test_panel_shows_progress_curves_samples_and_path(trainer, clock):
    view, seen = RunView(trainer, console(is_terminal=True)), []
    for event in ("after_rollout", "after_score", "after_step", "after_phase"):
        trainer.on(event)(lambda ctx: seen.append(drawn(view)))
    with view:
        assert "0 of 4 done" in drawn(view) and "phase 0: starting" in drawn(view)
        assert view.remaining_seconds() is None
        reports = [next(phases) for phases in [iter(trainer)] for _ in range(2)]
        picture = drawn(view)
        clock.now += 10
        assert view.remaining_seconds() == 30  # the mean pace is 15 seconds now
    doing = ["scoring", "learning", *(f"learning, step {n}/4" for n in (1, 2, 3, 4))]
    doing = [*(f"phase 0: {words} " for words in doing), "phase 1: sampling"]
    assert all(words in text for words, text in zip(doing, seen, strict=False))
    assert "1 of 4 done" in seen[6] and "sample of phase 0" in seen[6] and "0:30 left" in seen[6]
    parts = ("reel-nano", "reward sentiment", "2 of 4 done", "0:20 left", trainer.run.path.name)
    assert "sample of phase 1" in picture and all(x in picture for x in parts), picture
    for name, label in CURVES:
        first, last = (formatted(getattr(report, name)) for report in reports)
        row = rf"│ +{label} +{re.escape(first)} to {re.escape(last)} +[▁█]{{2}} "
        assert bool(re.search(row, picture)) == (last != "–"), label


@pytest.mark.slow
def test_a_resumed_run_reckons_with_its_own_phases_only(trainer, clock):
    for _ in range(2):
        trainer.run_phase()
    again, out = take_time(RLHFTrainer.resume(trainer.run.path), clock), console()
    with RunView(again, out) as view:
        next(iter(again))
        assert view.remaining_seconds() == 10
        assert "phase 2 | " in out.file.getvalue() and "phase 3" not in out.file.getvalue()
        assert "3 of 4 done" in drawn(view) and "sample of phase 2" in drawn(view)
        for _ in range(2):
            again.run_phase()
        assert "5 of 4 done" in drawn(view) and "0:00 left" in drawn(view)


@pytest.mark.slow
def test_the_panel_changes_no_weights_and_restores_the_terminal(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # which coverage sets
    unwatched = RLHFTrainer(trainer.args, out=tmp_path / "unwatched")
    unwatched.train()
    out = console(is_terminal=True)
    with pytest.raises(ZeroDivisionError), RunView(trainer, out) as view:
        trainer.train()
        raise ZeroDivisionError
    for a, b in zip(trainer.policy.parameters(), unwatched.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    text = out.file.getvalue()
    assert "╭" in text and "4 of 4 done" in text and "done   " in text
    assert "before learning" not in text and " | reward" not in text
    assert not view._live.is_started and text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 40, "▁▂▃▄▅▆▇█"),
        ([-2.0, 0.0, 6.0], 40, "▁▃█"),  # 0, 1/4 and 1 of 7 steps
        ([], 40, ""),
        ([None, float("nan"), 1.0, float("inf"), 2.0], 40, "▁█"),
        ([100.0, 0.0, 7.0], 2, "▁█"),
        ([1e38, -1e38, 0.0], 40, "█▁▅"),
    ],
)
def test_sparkline_matches_hand_drawn(values, width, bars):
    assert sparkline(values, width) == bars


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 40)])
def test_the_panel_fits_into_the_height_and_keeps_diagnostics(width, height):
    found = "the policy is far from the [red]reference[/red] " * 2
    lines = panel(width, height, (found,), **{label: [0.5] for label in "abcdefgh"}).splitlines()
    assert len(lines) <= height and {cell_len(line) for line in lines} == {width}
    unwrapped = re.sub(r"[\s│]+", " ", "".join(lines))
    assert f"since phase 1: {found.strip()}" in unwrapped and "0.000 this movie" in unwrapped
    narrow = panel(20, 24, loss=[None, 0.25, -164208.4], KL=[None]).splitlines()
    assert {cell_len(line) for line in narrow} == {20}


def test_rewards_are_colored_and_only_the_prompt_is_dimmed():
    texts, numbers = ["this movie is", "bad"], [[0, 7], [12]]
    table = sample_table(texts, [0.25, 0.75], "this movie", tokens=numbers)
    rewards, samples, ids = ([*column.cells] for column in table.columns)
    assert [text.plain for text in rewards] == ["0.250", "0.750"]
    assert [text.style for text in rewards] == [f"bold {ORANGE}", f"bold {BLUE}"]
    assert [text.plain for text in samples] == texts and samples[1].spans == []
    assert [(span.start, span.end, span.style) for span in samples[0].spans] == [(0, 10, "dim")]
    assert [text.plain for text in ids] == ["0 7", "12"] and sample_table([], []).row_count == 0
    assert reward_color(5.0, 0.0, 1.0) == BLUE and reward_color(0.5, 0.0, 1.0) == MIDDLE
    assert reward_color(0.9996, 0.9996, 0.9999) == MIDDLE  # both print as 1.000
