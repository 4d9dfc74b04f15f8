"""Padding: rows of equal length, and models run without left padding."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad


def pad_rows(
    rows: Sequence[Sequence[int]], device: torch.device, value: int = 0, side: str = "right"
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Return token rows as one tensor, padded on one side, and the mask of real tokens."""
    lengths = [len(row) for row in rows]
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if side == "left" else real
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    tokens = torch.full(real.shape, value).masked_scatter(real, flat)
    return move_to(device, tokens), move_to(device, real)


def move_to(device: torch.device, x: Tensor) -> Tensor:
    """Move a tensor; the host does not wait until a GPU has finished earlier work."""
    return x.to(device, non_blocking=device.type == "cuda")


def rotate_padding(
    x: Shaped[Tensor, "batch seq *rest"], attention_mask: Bool[Tensor, "batch seq"], to: str
) -> Shaped[Tensor, "batch seq *rest"]:
    """Move each row's left padding to the "right" end, or back to the "left", by rotation."""
    n_rows, seq = x.shape[:2]
    n_pad = (attention_mask.to(x.device).cumsum(1) == 0).sum(1, keepdim=True)
    offset = n_pad if to == "right" else -n_pad
    source = (torch.arange(seq, device=x.device) + offset) % seq
    return x[torch.arange(n_rows, device=x.device)[:, None], source]


def run_left_padded(
    run: Callable[[Int[Tensor, "batch seq"]], tuple[Tensor, ...]],
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None,
    padded: bool | None = None,
) -> tuple[Tensor, ...]:
    """Call `run` on rows whose left padding was moved to the right, and move its outputs back.

    Causal attention does not see padding on the right, so no mask is needed and position 0 is the
    first real token. `padded` is True if the mask has padding; if None, a GPU must stop to read it.
    """
    if attention_mask is None or padded is False:
        return run(input_ids)
    if padded is None:
        if bool(attention_mask.all()):
            return run(input_ids)
        n_starts = pad(attention_mask.int(), (1, 0)).diff(dim=1).eq(1).sum(1)
        if bool((n_starts > 1).any()):
            raise ValueError(
                "attention_mask is False between tokens that it shows in row "
                f"{int(n_starts.argmax())}. Mask padding at the ends of a row only."
            )
    outputs = run(rotate_padding(input_ids, attention_mask, "right"))
    return tuple(rotate_padding(output, attention_mask, "left") for output in outputs)
