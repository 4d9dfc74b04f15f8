"""Samples: generated tokens with their log-probs, values and masks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from rlhf_lab.functional import LOG_ZERO, token_logprobs

SomeRows = TypeVar("SomeRows", bound="Rows")
"""A type variable: the same class with some of its rows."""


class Rows:
    """What has a row for each sequence in all its tensors; an index takes some of the rows."""

    def __getitem__(self: SomeRows, rows: Int[Tensor, " rows"]) -> SomeRows:
        """The same of some of the sequences."""
        cut = {name: x[rows] for name, x in vars(self).items() if isinstance(x, Tensor | Rows)}
        return replace(self, **cut)


@dataclass(frozen=True)
class Support(Rows):
    """The tokens that truncation left at each step, kept so that training sees the same set.

    The policy that sampled is a distribution over these tokens. Were the set drawn again from the
    new logits, a token that was sampled could fall outside it and its log-probability be -inf (the
    "keep sampling mask" of DeepSeek-V3.2).

    Args:
        tokens: token ids, distinct within a step.
        kept: False where a step kept fewer tokens than the widest step.
    """

    tokens: Int[Tensor, "batch gen width"]
    kept: Bool[Tensor, "batch gen width"]

    def restrict(
        self, logits: Float[Tensor, "batch seq d_vocab"], prefix_len: int
    ) -> Float[Tensor, "batch seq d_vocab"]:
        """Logits with -inf outside the support, at the states before the generated tokens."""
        batch, _, d_vocab = logits.shape
        # what is not kept goes beyond the vocabulary, since it may name a token that is kept
        tokens = self.tokens.masked_fill(~self.kept, d_vocab)
        outside = logits.new_ones(batch, tokens.shape[1], d_vocab + 1, dtype=torch.bool)
        removed = torch.zeros_like(logits, dtype=torch.bool)
        # from the state before the first generated token to that before the last
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
    """What the policy wrote, and what was noted while it wrote.

    Args:
        tokens: prompts, padded on the left to one length, then the generated tokens; padding after
            a stop token.
        prompt_mask: False on the padding of shorter prompts.
        mask: True on generated tokens up to and including the first stop token.
        logprobs: of each generated token, under the distribution it was drawn from.
        values: the value head's estimate of the state before each generated token.
        support: the tokens that top-k or top-p left, when either is on.
        residuals: the policy's last residual before each generated token, if it was noted.
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
        """Prompt tokens per row, padding and BOS included."""
        return self.prompt_mask.shape[1]

    @property
    def attention_mask(self) -> Bool[Tensor, "batch seq"]:
        """False on the left padding; what `TransformerWithValueHead.forward` takes."""
        return torch.cat([self.prompt_mask, torch.ones_like(self.mask)], dim=1)

    @property
    def is_padded(self) -> bool:
        """Whether some prompts are shorter than others."""
        return not bool(self.prompt_mask.all())

    @property
    def written_mask(self) -> Bool[Tensor, "batch seq"]:
        """False on padding before the prompt and after the response.

        Tokens that do not count (see `RLHFTrainer.step`) are True if one that counts follows.
        """
        until_last = self.mask.flip(1).cumsum(1).flip(1) > 0
        return torch.cat([self.prompt_mask, until_last], dim=1)

    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt, without padding."""
        rows = zip(self.tokens[:, : self.prefix_len], self.prompt_mask, strict=True)
        return [ids[real].tolist() for ids, real in rows]

    def prompt_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The prompts as text, without special tokens."""
        ids = self.tokens[:, : self.prefix_len].tolist()
        rows = zip(ids, self.prompt_mask.tolist(), strict=True)
        return tokenizer.batch_decode(
            [list(compress(*row)) for row in rows], skip_special_tokens=True
        )

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Prompt and response as text, without special tokens or what follows a stop token."""
        real = self.written_mask.tolist()
        rows = [list(compress(*row)) for row in zip(self.tokens.tolist(), real, strict=True)]
        return tokenizer.batch_decode(rows, skip_special_tokens=True)


def join_samples(parts: Sequence[Samples], pad_token: int) -> Samples:
    """Several batches of equally long responses as one, with prompts padded to the longest.

    1. Pad tokens and prompt masks on the left.
    2. Widen each support to the widest, with nothing kept in what is added.
    3. Put everything one below the other.
    """
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
    """Tensors one below the other, padded on one side to be as wide as the widest."""
    width = max(part.shape[-1] for part in parts)
    gaps = [width - part.shape[-1] for part in parts]
    sides = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    return torch.cat([pad(x, at, value=value) for x, at in zip(parts, sides, strict=True)])
