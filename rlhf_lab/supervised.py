"""Supervised training: hold-out split, AdamW, cosine schedule with warm-up, progress bar."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from rlhf_lab.errors import ConfigError

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.05


def learning_rate_factor(step: int, steps: int) -> float:
    """Give the share of the peak learning rate: a linear warm-up, then half a cosine to zero."""
    warmup = max(1, int(steps * WARMUP_FRACTION))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def fit(
    model: torch.nn.Module,
    batch_loss: Callable[[], Float[Tensor, ""]],
    steps: int,
    learning_rate: float,
    title: str,
    show_progress: bool,
) -> Float[Tensor, " step"]:
    """Minimise a loss with AdamW and give its value at every step.

    1. Warm up, then let the learning rate fall along half a cosine.
    2. Each step: a fresh batch's loss, its gradient clipped to norm 1, one AdamW step.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps)
    )
    losses = []
    with _progress_bar(show_progress) as progress:
        task = progress.add_task(title, total=steps, loss=math.nan)
        for _ in range(steps):
            loss = batch_loss()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    return torch.tensor(losses)


def _progress_bar(show: bool) -> Progress:
    """Build a bar with the current loss and the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        disable=not show,
    )


@dataclass(frozen=True)
class Fitting:
    """How something is fitted to rows of examples, some of which are set aside.

    Args:
        steps: of the optimiser.
        batch_size: rows per step.
        learning_rate: at its peak.
        held_out: share of the rows that is set aside to measure on.
        seed: of the share that is set aside, and of the batches.
        show_progress: draw a bar with the loss and the time that is left.

    Raises:
        ConfigError: a number out of range.
    """

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 1e-3
    held_out: float = 0.2
    seed: int = 0
    show_progress: bool = True

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, batch_size=self.batch_size)
        if not 0 < self.held_out < 1:
            raise ConfigError(
                f"held_out={self.held_out} is out of range; choose a share such as 0.2."
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(
                f"learning_rate={self.learning_rate} must be finite and greater than 0."
            )

    def to_dict(self) -> dict[str, int | float]:
        """What decides the outcome, as plain JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "show_progress"}

    def split(
        self, n_rows: int, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, " held_out"], Int[np.ndarray, " train"]]:
        """Deal the rows: those that are set aside, at least 1, and those to train on, at least 1.

        Raises:
            ConfigError: there are fewer than 2 rows.
        """
        if n_rows < 2:
            raise ConfigError(
                f"there is {n_rows} example; give at least 2, one to train on and one to set aside."
            )
        order = rng.permutation(n_rows)
        n_held_out = min(max(1, round(self.held_out * n_rows)), n_rows - 1)
        return order[:n_held_out], order[n_held_out:]

    def fit(
        self,
        model: torch.nn.Module,
        rows: Int[np.ndarray, " train"],
        loss: Callable[[Int[np.ndarray, " batch"]], Float[Tensor, ""]],
        rng: np.random.Generator,
        title: str,
    ) -> Float[Tensor, " step"]:
        """Minimise the loss of random rows, each at most once in a batch; gives every step's."""
        size = min(self.batch_size, len(rows))
        batch_loss = lambda: loss(rng.choice(rows, size, replace=False))
        return fit(model, batch_loss, self.steps, self.learning_rate, title, self.show_progress)


def first_and_last(losses: Float[Tensor, " step"]) -> tuple[float, float]:
    """The mean loss of the first and of the last tenth of the steps."""
    tenth = max(1, len(losses) // 10)
    return losses[:tenth].mean().item(), losses[-tenth:].mean().item()


def check_positive(**numbers: int) -> None:
    """Refuse a number below 1.

    Raises:
        ConfigError: the first that is.
    """
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{name}={value} is out of range; it must be 1 or greater.")
