"""Padding: rows of one length, models run on them as if there were none, and texts too long."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SURELY_READ = 100_000
"""Characters of a text that are tokenized without a look at their number."""


def most_characters(tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> int:
    """More characters than so many tokens stand for, blanks aside.

    A text of megabytes would be tokenized for a minute before its length shows.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return max(SURELY_READ, n_tokens * longest)


def beginnings(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, n_tokens: int
) -> list[str]:
    """What of each text can matter where only its first tokens are read; whole words of it."""
    limit = most_characters(tokenizer, n_tokens)
    return [
        text if len(text) <= limit else (text[:limit].rsplit(None, 1) or [""])[0] for text in texts
    ]


def pad_rows(
    rows: Sequence[Sequence[int]], device: torch.device, value: int = 0, side: str = "right"
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Token rows of any lengths as one tensor, padded on one side, and the mask of real tokens."""
    lengths = [len(row) for row in rows]
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if side == "left" else real
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    tokens = torch.full(real.shape, value).masked_scatter(real, flat)
    return tokens.to(device), real.to(device)


def rotate_padding(
    x: Shaped[Tensor, "batch seq *rest"], attention_mask: Bool[Tensor, "batch seq"], to: str
) -> Shaped[Tensor, "batch seq *rest"]:
    """Move each row's left padding to its right end, or back to its left, by rotating it.

    Padding that is on the right already stays there.

    Args:
        attention_mask: False on padding, as the rows stand before it is moved.
        to: "left" or "right".
    """
    seq = x.shape[1]
    n_pad = (attention_mask.cumsum(1) == 0).sum(1, keepdim=True)
    offset = n_pad if to == "right" else -n_pad
    source = (torch.arange(seq, device=x.device) + offset) % seq
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, source]


def run_left_padded(
    run: Callable[[Int[Tensor, "batch seq"]], tuple[Tensor, ...]],
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None,
    padded: bool | None = None,
) -> tuple[Tensor, ...]:
    """Call `run` on rows whose padding was moved to the right, and move its outputs back.

    Causal attention never looks to the right, so padding there changes nothing, and position 0 is
    the first real token. Left padding that is masked instead attends to nothing, and NaN runs
    through the backward pass of its softmax.

    Args:
        attention_mask: False on padding to the left of a prompt.
        padded: whether the mask hides anything, where that is known; otherwise it is looked at,
            for which a GPU has to stop.

    Raises:
        ValueError: the mask, where it is looked at, hides a token between two that it shows.
    """
    if attention_mask is None or padded is False:
        return run(input_ids)
    if padded is None:
        if bool(attention_mask.all()):
            return run(input_ids)
        broken = _gaps(attention_mask).any(1)
        if bool(broken.any()):
            raise ValueError(
                "attention_mask is False between tokens that it shows in row "
                f"{int(broken.int().argmax())}, which would not be hidden; mask padding at the "
                "ends of a row only."
            )
    outputs = run(rotate_padding(input_ids, attention_mask, "right"))
    return tuple(rotate_padding(output, attention_mask, "left") for output in outputs)


def _gaps(attention_mask: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """True where a token is hidden, and one before and one after it are not."""
    before = attention_mask.cumsum(1) > 0
    after = attention_mask.flip(1).cumsum(1).flip(1) > 0
    return before & after & ~attention_mask
