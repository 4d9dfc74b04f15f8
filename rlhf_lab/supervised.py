"""Supervised training: hold-out split, AdamW, cosine schedule with warm-up, progress bar."""

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor

from rlhf_lab.errors import ConfigError

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.05


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the fraction of the peak learning rate: linear warm-up, then cosine to zero."""
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
    """Minimize by AdamW, gradients clipped to norm 1; return losses. ConfigError if not finite."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    factor = lambda step: learning_rate_factor(step, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    bar = "{task.description}", BarColumn(), MofNCompleteColumn()
    loss_and_time = "loss {task.fields[loss]:.3f}", TimeRemainingColumn()
    losses = []
    with Progress(*bar, *loss_and_time, disable=not show_progress) as progress:
        task = progress.add_task(title, total=steps, loss=math.nan)
        for _ in range(steps):
            loss = batch_loss()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            progress.update(task, advance=1, loss=losses[-1])
    weights_are_finite = all(parameter.isfinite().all() for parameter in model.parameters())
    if not (math.isfinite(losses[-1]) and weights_are_finite):
        raise ConfigError(
            f"The loss is {losses[-1]} at step {len(losses)}, or a weight is nan or inf, with "
            f"learning_rate={learning_rate:g}. Lower it and the weights of the loss."
        )
    return torch.tensor(losses)


def hold_out(
    n_rows: int, fraction: float, rng: np.random.Generator, name: str = "examples"
) -> tuple[Int[np.ndarray, " held_out"], Int[np.ndarray, " train"]]:
    """Split rows into held-out and training rows, at least 1 each; ConfigError below 2 rows."""
    if n_rows < 2:
        raise ConfigError(f"{name} must have at least 2 rows, one to hold out, got {n_rows}.")
    order = rng.permutation(n_rows)
    n_held_out = min(max(1, round(fraction * n_rows)), n_rows - 1)
    return order[:n_held_out], order[n_held_out:]


def first_and_last(losses: Float[Tensor, " step"]) -> tuple[float, float]:
    """Return the mean loss of the first and last tenth of the steps."""
    tenth = max(1, len(losses) // 10)
    return losses[:tenth].mean().item(), losses[-tenth:].mean().item()
