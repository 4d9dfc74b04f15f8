"""Rows of the eval text or the rollout, with their masks, for probes that run models."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.probes.probe import Observation

TextName = Literal["eval", "rollout"]


class TextRows(NamedTuple):
    """Sequences, with masks of tokens and of states."""

    tokens: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]  # False on padding, but True after a stop token
    written: Bool[Tensor, "batch seq"]  # False on all padding
    states: Bool[Tensor, "batch seq"]  # True where a state comes before a generated token
    prefix_len: int  # prompt tokens, padding included

    @property
    def own_positions(self) -> Int[Tensor, "batch seq"]:
        """Position of each token in its row, counted without left padding, which has -1."""
        return self.attention_mask.cumsum(1) - 1

    def take(self, rows: Bool[Tensor, " batch"]) -> "TextRows":
        """Return the rows where the mask is True."""
        return TextRows(*(x[rows] for x in self[:4]), self.prefix_len)


def text_rows(seen: Observation, text: TextName, n: int) -> TextRows:
    """Return the first n rows of the eval text (its states after a prompt's length), or samples."""
    if text == "rollout":
        samples = seen.ctx.rollout.samples
        before = torch.cat([samples.mask, torch.zeros_like(samples.mask[:, :1])], 1)
        states = torch.cat([torch.zeros_like(samples.prompt_mask[:, 1:]), before], 1)
        masks = samples.attention_mask, samples.written_mask, states
        return TextRows(samples.tokens[:n], *(x[:n] for x in masks), samples.prefix_len)
    chosen = seen.text.first(n)
    real = chosen.attention_mask
    place = torch.arange(real.shape[1], device=real.device).expand_as(real)
    last = chosen.lengths[:, None] - 1
    first = last.clamp(max=seen.prefix_len - 1)
    states = (place >= first) & (place < torch.maximum(last, first + 1))
    return TextRows(chosen.tokens, real, real, states, seen.prefix_len)
