"""The live panel of a run in progress on a terminal, plain lines elsewhere."""

import sys
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live

from rlhf_lab.console import print_line
from rlhf_lab.training import Context, PhaseReport, RLHFTrainer, Rollout
from rlhf_lab.training.report import reward_metric
from rlhf_lab.views.panel import CURVES, Display, in_short
from rlhf_lab.views.text import in_one_line

PANEL_SAMPLES = 5
LINE_WIDTH = 100
"""Columns that the line of a phase has at most."""
DOING = MappingProxyType(
    {"after_rollout": "scoring", "after_score": "learning", "after_phase": "sampling"}
)
"""What comes next at an event."""


def hours_minutes_seconds(seconds: float) -> str:
    """A duration as 0:42 or 1:03:20."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class RunView:
    """Shows a run while it happens; a context manager around `trainer.train()`.

    On a terminal it draws a panel with progress, remaining time, curves and samples; elsewhere, and
    under a debugger, whose prompt the panel would overwrite, it prints the first samples and a line
    per phase. Phases have the numbers that they have in the files, from 0 on; what is done of them
    is given as a count.
    """

    def __init__(self, trainer: RLHFTrainer, console: Console | None = None) -> None:
        self.trainer = trainer
        self.console = console or Console()
        self.reports: list[PhaseReport] = []
        self.rollout: Rollout | None = None
        self._sampled_in = 0
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
        else:
            count = self.trainer.args.total_phases
            numbers = f"{count} phases, numbered 0 to {count - 1}" if count > 1 else "1 phase, 0"
            units = "KL in nats per sequence, entropy in nats per token"
            print_line(f"{numbers}; {units}", self.console)
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
        return (monotonic() - self._began) / done * max(left, 0)

    def _at(self, ctx: Context) -> None:
        """Note what is new at an event, and show it."""
        args = ctx.args
        self.doing = DOING.get(ctx.event, self.doing)
        if ctx.event == "run_start" and (url := ctx.run.read_info().get("wandb_url")):
            print_line(f"wandb: {url}", self.console)
        if ctx.event == "after_step":
            steps = args.num_minibatches * args.batches_per_learning_phase
            self.doing = f"learning, step {ctx.step + 1}/{steps}"
        elif ctx.event == "after_score":
            self.rollout, self._sampled_in = ctx.rollout, ctx.phase
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
            print_line(f"  {reward:6.3f}  {in_one_line(text)}", self.console)

    def _line(self, report: PhaseReport) -> str:
        """Its number, what fits of its figures, the first of them first, and the time left."""
        left = f"{hours_minutes_seconds(self.remaining_seconds() or 0.0)} left"
        parts = [f"phase {report.phase}"]
        figures = [(label, getattr(report, name), form) for name, _, label, form in CURVES]
        means = report.rollout.reward_means or {}
        figures[1:1] = [(reward_metric(name), mean, "z.3f") for name, mean in means.items()]
        for label, value, form in figures:
            longer = [*parts, f"{label} {in_short(value, form)}"]
            if value is not None and len(" | ".join([*longer, left])) <= LINE_WIDTH:
                parts = longer
        return " | ".join([*parts, left])

    def _remarks(self) -> list[dict[str, Any]]:
        """What was said so far about learning that is dead or has exploded."""
        return list(self.trainer.recorder.diagnostics.values())

    def panel(self) -> Display:
        """The whole picture as it is now."""
        args, samples = self.trainer.args, []
        if self.rollout is not None:
            rewards = self.rollout.raw_rewards[:PANEL_SAMPLES].tolist()
            samples = list(zip(self.rollout.texts, rewards, strict=False))
        reward = "your own" if "reward_fn" in self.trainer.custom_components else args.reward_fn
        title = f"rlhf_lab  {args.base_model}  reward {reward}  {self.trainer.device}"
        phase, remaining = self._first_phase + len(self.reports), self.remaining_seconds()
        return Display(
            title=title,
            subtitle="" if self.trainer.run is None else str(self.trainer.run.path),
            done=phase,
            total=args.total_phases,
            left="" if remaining is None else f"{hours_minutes_seconds(remaining)} left",
            doing="done" if phase >= args.total_phases else f"phase {phase}: {self.doing}",
            reports=list(self.reports),
            samples=samples,
            sampled_in=self._sampled_in,
            prompt=args.prefix,
            diagnostics=[f"since phase {r['phase']}: {r['text']}" for r in self._remarks()],
        )
