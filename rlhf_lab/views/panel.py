"""The contents of the live panel at one moment: progress, curves, samples and diagnostics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhf_lab.console import visible
from rlhf_lab.training import PhaseReport
from rlhf_lab.training.report import reward_metric
from rlhf_lab.views.text import in_one_line, sample_table, sparkline

CURVES = (
    ("mean_reward", "reward", "reward", "z.3f"),
    ("true_reward", "true reward", "true", "z.3f"),
    ("grammatical_fraction", "grammatical", "grammatical", "z.3f"),
    ("kl_per_sequence", "KL nats/seq", "KL", "z.3f"),
    ("kl_to_initial_per_sequence", "KL to the start", "KL to start", "z.3f"),
    ("entropy_per_token", "entropy nats/tok", "entropy", "z.3f"),
    ("uninformative_group_fraction", "uninformative", "uninformative", "z.3f"),
    ("clip_fraction", "clip fraction", "clip fraction", "z.3f"),
    ("approx_kl_per_token", "approx KL nats/tok", "approx KL", ".3g"),
    ("explained_variance", "explained variance", "explained variance", "z.3f"),
    ("value_loss", "value loss", "value loss", ".3g"),
    ("base_lr", "learning rate", "learning rate", ".3g"),
    ("head_lr", "learning rate, head", "learning rate, head", ".3g"),
)
"""Of a report: the name, its label in the panel, a shorter one for a line, and its format.

The first half is what the policy does, the second how it learns.
"""
_LABEL, _NUMBER = max(len(row[1]) for row in CURVES), 8
_NUMBERS = 2 * _NUMBER + len(" to ")
_PADDING = 6
"""Columns between and around those of the table of curves."""


def in_short(value: float | None, form: str) -> str:
    """A number of at most nine characters; a dash for one that is not known."""
    if value is None:
        return "–"
    return format(value, form if abs(value) < 1e5 else ".3g")


@dataclass(frozen=True)
class Display:
    """The panel at one moment, with as many samples as the terminal's height holds.

    Args:
        title, subtitle: above and below, without markup.
        done, total: how many phases are done, and of how many.
        left, doing: the remaining time, and what is done now.
        reports: of the phases so far, for the curves.
        samples: the first texts of the newest batch with their rewards.
        sampled_in: the phase of that batch.
        prompt: is dimmed in the samples.
        diagnostics: lines below.
    """

    title: str
    subtitle: str
    done: int
    total: int
    left: str
    doing: str
    reports: Sequence[PhaseReport]
    samples: Sequence[tuple[str, float]]
    sampled_in: int
    prompt: str
    diagnostics: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Panel]:
        width = options.max_width - 4  # within the frame
        diagnostics = [Text(line, style="yellow") for line in self.diagnostics]
        curves = self._curves(width)
        taken = 3 + curves.row_count + sum(len(r.wrap(console, width)) for r in diagnostics)
        parts: list[RenderableType] = [self._progress(width), curves]
        parts += self._samples(console, width, options.size.height - taken)
        yield Panel(
            Group(*parts, *diagnostics),
            title=Text(visible(self.title)),
            subtitle=Text(visible(self.subtitle)) if self.subtitle else None,
            border_style="blue",
        )

    def _progress(self, width: int) -> Table:
        """How far the run is; where it is narrow, what is done now gives way."""
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_column(min_width=28 if width > 70 else None)  # so that the bar keeps its length
        bar = ProgressBar(total=self.total, completed=self.done)
        doing = Text(self.doing, no_wrap=True, overflow="ellipsis")
        grid.add_row(f"{self.done} of {self.total} done", bar, self.left, doing)
        return grid

    def _curves(self, width: int) -> Table:
        """A row per number: its name, its first and last value, and the way between.

        Where it is narrow, the curve gives way, and then the first value.
        """
        table = Table(box=None, padding=(0, 1), show_header=False)
        table.add_column()  # the first to be cut
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True)
        room = width - _LABEL - _NUMBERS - _PADDING
        shown = (0, -1) if room >= 0 else (-1,)
        means = [report.rollout.reward_means or {} for report in self.reports]
        by_name = [
            (reward_metric(name), [of_phase.get(name) for of_phase in means], "z.3f")
            for name in dict.fromkeys(name for of_phase in means for name in of_phase)
        ]
        known = [
            (label, [getattr(report, name) for report in self.reports], form)
            for name, label, _, form in CURVES
        ]
        for label, values, form in [*known[:1], *by_name, *known[1:]]:
            if any(value is not None for value in values):
                numbers = " to ".join(in_short(values[i], form) for i in shown)
                curve = sparkline(values, room) if room > 0 else ""
                named = Text(visible(label), no_wrap=True, overflow="ellipsis")
                table.add_row(named, numbers, Text(curve, style="blue"))
        return table

    def _samples(self, console: Console, width: int, height: int) -> list[RenderableType]:
        """A blank line and the table of the first samples, as many as are whole in this height."""
        number = max([len("reward"), *(len(f"{reward:.3f}") for _, reward in self.samples)])
        shown, height = [], height - 2  # with the line of titles
        for text, reward in self.samples:
            height -= len(
                Text(visible(in_one_line(text))).wrap(console, max(width - number - 4, 1))
            )
            if height < 0:
                break
            shown.append((text, reward))
        if not shown:
            return []
        texts, rewards = zip(*shown, strict=True)
        return [
            Text(),
            sample_table(texts, rewards, self.prompt, f"sample of phase {self.sampled_in}"),
        ]
