"""Samples: generated tokens with their log-probs, values and masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from rlhf_lab.functional import LOG_ZERO, token_logprobs

SomeRows = TypeVar("SomeRows", bound="Rows")  # Rows, or a subclass of it


class Rows:
    """A dataclass whose tensors all have a row per sequence; an index selects rows."""

    def __getitem__(self: SomeRows, rows: Int[Tensor, " rows"]) -> SomeRows:
        return self.map(lambda x: x[rows])

    def to(self: SomeRows, device: str | torch.device) -> SomeRows:
        """Move all tensors to a device."""
        return self.map(lambda x: x.to(device))

    def map(self: SomeRows, function: Callable[[Tensor], Tensor]) -> SomeRows:
        """Apply a function to all tensors, including those of fields that are `Rows`."""
        changed = {
            name: function(x) if isinstance(x, Tensor) else x.map(function)
            for name, x in vars(self).items()
            if isinstance(x, Tensor | Rows)
        }
        return replace(self, **changed)


@dataclass(frozen=True)
class Support(Rows):
    """The tokens that truncation left at each step, for training on the same set.

    The sampling policy is a distribution over these tokens. Truncating the new logits again could
    remove a sampled token, whose log-probability would be -inf (the "keep sampling mask" of
    DeepSeek-V3.2).

    Args:
        tokens: token ids, distinct within a step.
        kept: False where a step kept fewer tokens than the widest step.
    """

    tokens: Int[Tensor, "batch gen width"]
    kept: Bool[Tensor, "batch gen width"]

    def restrict(
        self, logits: Float[Tensor, "batch seq d_vocab"], prefix_len: int
    ) -> Float[Tensor, "batch seq d_vocab"]:
        """Return logits with -inf outside the support, at the states before generated tokens."""
        batch, _, d_vocab = logits.shape
        # an id that is not kept may equal a kept one, so move it outside the vocabulary
        tokens = self.tokens.masked_fill(~self.kept, d_vocab)
        outside = logits.new_ones(batch, tokens.shape[1], d_vocab + 1, dtype=torch.bool)
        removed = torch.zeros_like(logits, dtype=torch.bool)
        removed[:, prefix_len - 1 : -1] = outside.scatter(-1, tokens, False)[..., :-1]
        return logits.masked_fill(removed, -torch.inf)

    def token_logprobs(
        self, logprobs: Float[Tensor, "batch gen d_vocab"], tokens: Int[Tensor, "batch gen"]
    ) -> Float[Tensor, "batch gen"]:
        """Compute the log-probability of each generated token, renormalized over the support.

        1. Gather the log-probabilities of the support (`log_probs` computes `logprobs`).
        2. Subtract their logsumexp from that of the token.
        3. Set a token outside the support to -inf.
        """
        inside = logprobs.gather(-1, self.tokens).masked_fill(~self.kept, LOG_ZERO)
        renormalized = token_logprobs(logprobs, tokens) - inside.logsumexp(dim=-1)
        is_kept = ((self.tokens == tokens[..., None]) & self.kept).any(dim=-1)
        return renormalized.masked_fill(~is_kept, -torch.inf)


@dataclass(frozen=True)
class Samples(Rows):
    """Sampled tokens, with the numbers of the policy that sampled them.

    Args:
        tokens: prompts, padded on the left to one length, then the generated tokens; padding after
            a stop token.
        prompt_mask: False on the padding of shorter prompts.
        mask: True on generated tokens up to and including the first stop token.
        logprobs: of each generated token, under the distribution it was drawn from.
        values: the value head's estimate of the state before each generated token.
        support: the tokens that top-k or top-p left; None without truncation.
        residuals: the policy's final residual before each generated token, if stored.
        engine_logprobs: of each generated token by the rollout engine that sampled it, if known.
    """

    tokens: Int[Tensor, "batch seq"]
    prompt_mask: Bool[Tensor, "batch prefix"]
    mask: Bool[Tensor, "batch gen"]
    logprobs: Float[Tensor, "batch gen"]
    values: Float[Tensor, "batch gen"]
    support: Support | None
    residuals: Float[Tensor, "batch gen d_model"] | None = None
    engine_logprobs: Float[Tensor, "batch gen"] | None = None

    @property
    def prefix_len(self) -> int:
        """Prompt tokens per row, including padding and BOS."""
        return self.prompt_mask.shape[1]

    @property
    def attention_mask(self) -> Bool[Tensor, "batch seq"]:
        """False on the left padding."""
        return torch.cat([self.prompt_mask, torch.ones_like(self.mask)], dim=1)

    @property
    def is_padded(self) -> bool:
        """True if some prompts are shorter than others."""
        return not bool(self.prompt_mask.all())

    @property
    def written_mask(self) -> Bool[Tensor, "batch seq"]:
        """False on padding before the prompt and after the response.

        Tokens that do not count (see `RLHFTrainer.step`) are True if one that counts follows.
        """
        until_last = self.mask.flip(1).cumsum(1).flip(1) > 0
        return torch.cat([self.prompt_mask, until_last], dim=1)

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each prompt, without padding."""
        rows = zip(self.tokens[:, : self.prefix_len], self.prompt_mask, strict=True)
        return [ids[real].tolist() for ids, real in rows]

    def prompt_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the prompts as text, without special tokens."""
        ids = self.tokens[:, : self.prefix_len].tolist()
        rows = zip(ids, self.prompt_mask.tolist(), strict=True)
        return tokenizer.batch_decode(
            [list(compress(*row)) for row in rows], skip_special_tokens=True
        )

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return prompt and response as text, without special tokens and text after a stop."""
        real = self.written_mask.tolist()
        rows = [list(compress(*row)) for row in zip(self.tokens.tolist(), real, strict=True)]
        return tokenizer.batch_decode(rows, skip_special_tokens=True)


def join_samples(parts: Sequence[Samples], pad_token: int) -> Samples:
    """Concatenate batches of equally long responses, with prompts padded to the longest."""
    supports = [part.support for part in parts]
    residuals, engine = ([getattr(x, k) for x in parts] for k in ("residuals", "engine_logprobs"))
    support = None
    if supports[0] is not None:
        tokens, kept = ([getattr(s, name) for s in supports] for name in ("tokens", "kept"))
        support = Support(_widened(tokens), _widened(kept))
    return Samples(
        tokens=_widened([part.tokens for part in parts], "left", pad_token),
        prompt_mask=_widened([part.prompt_mask for part in parts], "left"),
        mask=torch.cat([part.mask for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        values=torch.cat([part.values for part in parts]),
        support=support,
        residuals=None if any(x is None for x in residuals) else torch.cat(residuals),
        engine_logprobs=None if any(x is None for x in engine) else torch.cat(engine),
    )


def _widened(parts: Sequence[Tensor], side: str = "right", value: int = 0) -> Tensor:
    """Concatenate tensors, padded on one side to the widest."""
    width = max(part.shape[-1] for part in parts)
    gaps = [width - part.shape[-1] for part in parts]
    sides = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    return torch.cat([pad(x, at, value=value) for x, at in zip(parts, sides, strict=True)])
