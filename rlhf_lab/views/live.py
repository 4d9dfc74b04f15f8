"""Live panel of a run on a terminal: progress, curves and samples; elsewhere a line per phase."""

import math
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic
from types import MappingProxyType

from rich.color import blend_rgb
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhf_lab.console import print_line, visible
from rlhf_lab.training import Context, PhaseReport, RLHFTrainer
from rlhf_lab.training.report import reward_metric
from rlhf_lab.views.marks import BLUE, ORANGE
from rlhf_lab.views.templates import formatted

BARS = "▁▂▃▄▅▆▇█"
PANEL_SAMPLES = 5
LINE_LABELS = 30  # letters of the labels in the line of a phase
NEXT = MappingProxyType(
    {"after_rollout": "scoring", "after_score": "learning", "after_phase": "sampling"}
)
CURVES = (  # name in the report, and label
    ("mean_reward", "reward"),
    ("true_reward", "true reward"),
    ("grammatical_fraction", "grammatical"),
    ("kl_per_sequence", "KL nats/seq"),
    ("kl_to_initial_per_sequence", "KL to the start"),
    ("entropy_per_token", "entropy nats/tok"),
    ("uninformative_group_fraction", "uninformative"),
    ("steps_fraction", "with steps"),
    ("clip_fraction", "clip fraction"),
    ("approx_kl_per_token", "approx KL nats/tok"),
    ("explained_variance", "explained variance"),
    ("value_loss", "value loss"),
    ("base_lr", "learning rate"),
    ("head_lr", "learning rate, head"),
)
LABEL_WIDTH, NUMBERS_WIDTH = 19, 24


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Return the last `width` values as bars between their minimum and maximum.

    Values that are None or not finite are left out.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)][-width:]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    return "".join(BARS[round((x - low) / (span or 1.0) * (len(BARS) - 1))] for x in finite)


def reward_color(value: float, low: float, high: float) -> str:
    """Return a color between orange (low) and blue (high); equal three decimals look equal."""
    value, low, high = (round(number, 3) for number in (value, low, high))
    share = 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
    return blend_rgb(ORANGE, BLUE, share).rgb


def sample_table(
    texts: Sequence[str],
    rewards: Sequence[float],
    prompt: str = "",
    title: str = "sample",
    tokens: Sequence[Sequence[int]] | None = None,
) -> Table:
    """Return a table of samples, colored by reward, with the prompt dimmed.

    Args:
        tokens: the token ids of each, for another column, such as `samples.tokens.tolist()`.
    """
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column(title, ratio=1)
    if tokens is not None:
        table.add_column("token ids", ratio=1)
    ids = [[]] * len(texts) if tokens is None else [[" ".join(map(str, row))] for row in tokens]
    for text, reward, row in zip(texts, rewards, ids, strict=True):
        line = Text(visible(text.replace("\n", " ")))
        if prompt and text.startswith(prompt):
            line.stylize("dim", 0, len(visible(prompt)))
        color = reward_color(reward, min(rewards), max(rewards))
        last = (Text(x, style="dim") for x in row)
        table.add_row(Text(f"{reward:.3f}", style=f"bold {color}"), line, *last)
    return table


def metrics_by_label(report: PhaseReport) -> dict[str, float | None]:
    """Return the metrics of a phase in the order of the panel, several rewards after their sum."""
    found = {label: getattr(report, name) for name, label in CURVES}
    by_name = {reward_metric(k): x for k, x in (report.rollout.reward_means or {}).items()}
    return {"reward": found["reward"]} | by_name | found


class RunView:
    """View of a run in progress; a context manager around `trainer.train()`.

    On a terminal it is a live panel. Elsewhere, and under a debugger, whose prompt the panel would
    overwrite, it prints the first samples and a line per phase. Phases are numbered from 0, as in
    the files of the run.
    """

    def __init__(self, trainer: RLHFTrainer, console: Console | None = None) -> None:
        self.trainer, self.console = trainer, console or Console()
        self.metrics: list[dict[str, float | None]] = []
        self.samples: list[tuple[str, float]] = []
        self.sampled_in, self.doing = 0, "starting"
        self._first_phase, self._began = trainer.phase, monotonic()
        self._live: Live | None = None
        for event in (*NEXT, "run_start", "after_step"):
            trainer.on(event)(self._update)

    def __enter__(self) -> "RunView":
        self._began = monotonic()
        if self.console.is_terminal and sys.gettrace() is None:
            self._live = Live(self, console=self.console, refresh_per_second=4)
            self._live.start(refresh=True)
        else:
            count = self.trainer.args.total_phases
            numbers = f"{count} phases, numbered 0 to {count - 1}" if count > 1 else "1 phase, 0"
            units = "KL in nats per sequence, entropy in nats per token"
            print_line(f"{numbers}; {units}", self.console)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def remaining_seconds(self) -> float | None:
        """Return the time left at the mean pace, or None before the first phase is done."""
        done = len(self.metrics)
        left = max(self.trainer.args.total_phases - self._first_phase - done, 0)
        return (monotonic() - self._began) / done * left if done else None

    def _update(self, ctx: Context) -> None:
        args = ctx.args
        self.doing = NEXT.get(ctx.event, self.doing)
        if ctx.event == "run_start" and (url := ctx.run.read_info().get("wandb_url")):
            print_line(f"wandb: {url}", self.console)
        elif ctx.event == "after_step":
            steps = args.num_minibatches * args.batches_per_learning_phase
            self.doing = f"learning, step {ctx.step + 1}/{steps}"
        elif ctx.event == "after_score":
            rewards = ctx.rollout.raw_rewards[:PANEL_SAMPLES].tolist()
            self.samples = list(zip(ctx.rollout.texts, rewards, strict=False))
            self.sampled_in = ctx.phase
        elif ctx.event == "after_phase":
            self.metrics.append(metrics_by_label(ctx.report))
        if self._live is not None:
            return
        if ctx.event == "after_phase":
            print_line(self._format_line(ctx.phase), self.console)
            for diagnostic in self.trainer.recorder.diagnostics.values():
                if diagnostic["phase"] == ctx.phase:
                    print_line(f"phase {ctx.phase}: {diagnostic['text']}", self.console)
        is_first = ctx.event == "after_score" and ctx.phase == self._first_phase
        is_last = ctx.event == "after_phase" and ctx.phase + 1 == args.total_phases
        if is_first or is_last:
            when = ", before learning" * is_first
            print_line(f"samples of phase {ctx.phase}{when}:", self.console)
        for text, reward in self.samples if is_first or is_last else ():
            line = text.replace("\n", " ")
            print_line(f"  {reward:6.3f}  {line}", self.console)

    def _format_line(self, phase: int) -> str:
        parts, room = [f"phase {phase}"], LINE_LABELS
        for label, first in self.metrics[0].items():  # every line has the labels of the first
            short = "true" if label == "true reward" else label.partition(" nats")[0]
            if first is not None and len(short) <= room:
                parts.append(f"{short} {formatted(self.metrics[-1].get(label))}")
                room -= len(short)
        left = timedelta(seconds=round(self.remaining_seconds() or 0.0))
        return " | ".join([*parts, f"{left} left"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Panel]:
        trainer, width = self.trainer, options.max_width - 4
        reward = "custom" if "reward_fn" in trainer.custom_components else trainer.args.reward_fn
        title = f"rlhf_lab  {trainer.args.base_model}  reward {reward}  {trainer.device}"
        parts: list[RenderableType] = [self._progress(), self._curves(width)]
        for x in trainer.recorder.diagnostics.values():
            parts.append(Text(visible(f"since phase {x['phase']}: {x['text']}"), style="yellow"))
        if self.samples:
            columns = zip(*self.samples, strict=True)
            title_of = f"sample of phase {self.sampled_in}"
            parts += [Text(), sample_table(*columns, trainer.args.prefix, title_of)]
        rows = len(console.render_lines(Group(*parts), options.update(width=width)))
        yield Panel(
            Group(*parts),
            title=Text(visible(title)),
            subtitle=Text(visible(str(trainer.run.path))) if trainer.run else None,
            border_style="blue",
            height=min(rows + 2, options.size.height),
        )

    def _progress(self) -> Table:
        total, left = self.trainer.args.total_phases, self.remaining_seconds()
        done = self._first_phase + len(self.metrics)
        grid = Table.grid(padding=(0, 2), expand=True)
        for size in ({}, {"ratio": 1}, {}, {"width": 28}):  # fixed: the bar keeps its length
            grid.add_column(no_wrap=True, **size)
        grid.add_row(
            f"{done} of {total} done",
            ProgressBar(total=total, completed=done),
            "" if left is None else f"{timedelta(seconds=round(left))} left",
            "done" if done >= total else f"phase {done}: {self.doing}",
        )
        return grid

    def _curves(self, width: int) -> Table:
        table = Table(box=None, padding=(0, 1), show_header=False)
        table.add_column()
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True)
        room = width - LABEL_WIDTH - NUMBERS_WIDTH - 6
        for label in self.metrics[-1] if self.metrics else ():
            values = [metrics.get(label) for metrics in self.metrics]
            if any(x is not None for x in values):
                ends = (values[0], values[-1]) if room >= 0 else values[-1:]
                numbers = " to ".join(map(formatted, ends))
                curve = sparkline(values, room) if room > 0 else ""
                named = Text(visible(label), no_wrap=True, overflow="ellipsis")
                table.add_row(named, numbers, Text(curve, style="blue"))
        return table
