"""The live panel of a run in progress on a terminal, plain lines elsewhere."""

import sys
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhf_lab.console import print_line, visible
from rlhf_lab.training import Context, PhaseReport, RLHFTrainer, Rollout
from rlhf_lab.views.text import sample_table, sparkline

PANEL_SAMPLES = 5
DOING = MappingProxyType(
    {"after_rollout": "scoring", "after_score": "learning", "after_phase": "sampling"}
)
"""What comes next at an event."""
PANEL_CURVES = (
    ("mean_reward", "reward"),
    ("gold_reward", "gold"),
    ("grammatical_fraction", "grammatical"),
    ("kl_per_sequence", "KL nats/seq"),
    ("entropy_per_token", "entropy nats/tok"),
    ("uninformative_group_fraction", "uninformative"),
)


def hours_minutes_seconds(seconds: float) -> str:
    """A duration as 0:42 or 1:03:20."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class RunView:
    """Shows a run while it happens; a context manager around `trainer.train()`.

    On a terminal it draws a panel with progress, remaining time, curves and samples; elsewhere, and
    under a debugger, whose prompt the panel would overwrite, it prints the first samples and a line
    per phase.
    """

    def __init__(self, trainer: RLHFTrainer, console: Console | None = None) -> None:
        self.trainer = trainer
        self.console = console or Console()
        self.reports: list[PhaseReport] = []
        self.rollout: Rollout | None = None
        self.doing = "starting"
        self._first_phase = trainer.phase
        self._began = monotonic()
        self._live: Live | None = None
        for event in (*DOING, "run_start", "after_step", "run_end"):
            trainer.on(event)(self._at)

    def __enter__(self) -> "RunView":
        self._began = monotonic()
        if self.console.is_terminal and sys.gettrace() is None:
            self._live = Live(self.panel(), console=self.console, refresh_per_second=4)
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.update(self.panel(), refresh=True)
            self._live.stop()

    def remaining_seconds(self) -> float | None:
        """Time left at the pace so far, or None before the first phase is done."""
        done = len(self.reports)
        if done == 0:
            return None
        left = self.trainer.args.total_phases - self._first_phase - done
        return (monotonic() - self._began) / done * left

    def _at(self, ctx: Context) -> None:
        """Note what is new at an event, and show it."""
        args = ctx.args
        self.doing = DOING.get(ctx.event, self.doing)
        if ctx.event == "after_step":
            steps = args.num_minibatches * args.batches_per_learning_phase
            self.doing = f"learning, step {ctx.step + 1}/{steps}"
        elif ctx.event == "after_score":
            self.rollout = ctx.rollout
        elif ctx.event == "after_phase":
            self.reports.append(ctx.report)
        if self._live is not None:
            self._live.update(self.panel())
        elif ctx.event == "after_score" and ctx.phase == self._first_phase:
            self._print_samples(f"samples of phase {ctx.phase}, before learning")
        elif ctx.event == "after_phase":
            print_line(self._line(ctx.report), self.console)
            for remark in self._remarks():
                if remark["phase"] == ctx.phase:
                    print_line(f"phase {ctx.phase}: {remark['text']}", self.console)
            if ctx.phase + 1 == args.total_phases:
                self._print_samples(f"samples of phase {ctx.phase}")

    def _print_samples(self, title: str) -> None:
        print_line(f"{title}:", self.console)
        rewards = self.rollout.raw_rewards.tolist()
        for text, reward in list(zip(self.rollout.texts, rewards, strict=True))[:PANEL_SAMPLES]:
            flat = text.replace("\n", " ")
            print_line(f"  {reward:6.3f}  {flat}", self.console)

    def _line(self, report: PhaseReport) -> str:
        numbers = [
            f"{label} {getattr(report, name):.3f}"
            for name, label in PANEL_CURVES
            if getattr(report, name) is not None
        ]
        remaining = self.remaining_seconds() or 0.0
        number = f"phase {report.phase + 1}/{self.trainer.args.total_phases}"
        return " | ".join([number, *numbers, f"{hours_minutes_seconds(remaining)} left"])

    def _remarks(self) -> list[dict[str, Any]]:
        """What was said so far about learning that is dead or has exploded."""
        return list(self.trainer.recorder.remarks.values())

    def panel(self) -> Panel:
        """The whole picture as it is now."""
        parts: list[RenderableType] = [self._progress(), self._curves()]
        if self.rollout is not None:
            rewards = self.rollout.raw_rewards[:PANEL_SAMPLES].tolist()
            prefix = self.trainer.args.prefix
            parts += [Text(), sample_table(self.rollout.texts[:PANEL_SAMPLES], rewards, prefix)]
        for remark in self._remarks():
            parts.append(Text(f"since phase {remark['phase']}: {remark['text']}", style="yellow"))
        args = self.trainer.args
        reward = "your own" if "reward_fn" in self.trainer.own_parts else args.reward_fn
        title = f"rlhf_lab  {args.base_model}  reward {reward}  {self.trainer.device}"
        where = "" if self.trainer.run is None else str(self.trainer.run.path)
        title, where = (Text(visible(text)) for text in (title, where))
        return Panel(Group(*parts), title=title, subtitle=where or None, border_style="blue")

    def _progress(self) -> Table:
        args, phase = self.trainer.args, self._first_phase + len(self.reports)
        remaining = self.remaining_seconds()
        left = "" if remaining is None else f"{hours_minutes_seconds(remaining)} left"
        doing = "done" if phase >= args.total_phases else self.doing
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, min_width=19)
        bar = ProgressBar(total=args.total_phases, completed=phase)
        grid.add_row(f"phase {phase}/{args.total_phases}", bar, left, doing)
        return grid

    def _curves(self) -> Table:
        table = Table(box=None, padding=(0, 1), show_header=False)
        table.add_column(min_width=17)
        table.add_column(justify="right", min_width=15)
        table.add_column(no_wrap=True, min_width=40)
        for name, label in PANEL_CURVES:
            values = [getattr(report, name) for report in self.reports]
            if values and values[-1] is not None:
                first_and_last = f"{values[0]:.3f} to {values[-1]:.3f}"
                table.add_row(label, first_and_last, Text(sparkline(values), style="blue"))
        return table
