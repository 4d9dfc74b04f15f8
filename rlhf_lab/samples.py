"""Samples: generated tokens with their log-probs, values and masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
        return _kept_ids(self.tokens[:, : self.prefix_len], self.prompt_mask)

    def prompt_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the prompts as text, without special tokens."""
        return tokenizer.batch_decode(self.prompts(), skip_special_tokens=True)

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return prompt and response as text, without special tokens and text after a stop."""
        rows = _kept_ids(self.tokens, self.written_mask)
        return tokenizer.batch_decode(rows, skip_special_tokens=True)


def _kept_ids(tokens: Int[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> list[list[int]]:
    return [[x for x in row if x >= 0] for row in tokens.masked_fill(~mask, -1).tolist()]


def join_samples(parts: Sequence[Samples], pad_token: int) -> Samples:
    """Concatenate batches of equally long responses, with prompts padded to the longest."""
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    joined = {name: None for name, xs in columns.items() if any(x is None for x in xs)}
    if "support" not in joined:
        tokens, kept = ([getattr(s, k) for s in columns["support"]] for k in ("tokens", "kept"))
        joined["support"] = Support(_widened(tokens), _widened(kept))
    joined["tokens"] = _widened(columns["tokens"], "left", pad_token)
    joined["prompt_mask"] = _widened(columns["prompt_mask"], "left")
    plain = columns.keys() - joined.keys()
    return Samples(**joined, **{name: torch.cat(columns[name]) for name in plain})


def _widened(parts: Sequence[Tensor], side: str = "right", value: int = 0) -> Tensor:
    """Concatenate tensors, padded on one side to the widest."""
    width = max(part.shape[-1] for part in parts)
    gaps = [(0, width - part.shape[-1]) for part in parts]
    sides = [gap[::-1] if side == "left" else gap for gap in gaps]
    return torch.cat([pad(x, at, value=value) for x, at in zip(parts, sides, strict=True)])
