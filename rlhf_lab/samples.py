"""Samples: generated tokens with their log-probs, values and masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Support:
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

    def __getitem__(self, rows: Int[Tensor, " rows"]) -> "Support":
        """The support of some of the sequences."""
        return Support(self.tokens[rows], self.kept[rows])

    def restrict(
        self, logits: Float[Tensor, "batch seq d_vocab"], prefix_len: int
    ) -> Float[Tensor, "batch seq d_vocab"]:
        """Logits with -inf outside the support, at the states before the generated tokens."""
        inside = torch.zeros_like(logits[:, prefix_len - 1 : -1], dtype=torch.bool)
        inside = inside.scatter(-1, self.tokens, self.kept)
        removed = torch.zeros_like(logits, dtype=torch.bool)
        removed[:, prefix_len - 1 : -1] = ~inside
        return logits.masked_fill(removed, -torch.inf)


@dataclass(frozen=True)
class Samples:
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
    """

    tokens: Int[Tensor, "batch seq"]
    prompt_mask: Bool[Tensor, "batch prefix"]
    mask: Bool[Tensor, "batch gen"]
    logprobs: Float[Tensor, "batch gen"]
    values: Float[Tensor, "batch gen"]
    support: Support | None
    residuals: Float[Tensor, "batch gen d_model"] | None = None

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

    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt, without padding."""
        rows = zip(self.tokens[:, : self.prefix_len], self.prompt_mask, strict=True)
        return [ids[real].tolist() for ids, real in rows]

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Prompt and response as text, without special tokens or what follows a stop token.

        Tokens that do not count (see `RLHFTrainer.step`) are there if one that counts follows.
        """
        until_last = self.mask.flip(1).cumsum(1).flip(1) > 0
        real = torch.cat([self.prompt_mask, until_last], dim=1).tolist()
        rows = [list(compress(*row)) for row in zip(self.tokens.tolist(), real, strict=True)]
        return tokenizer.batch_decode(rows, skip_special_tokens=True)


def join_samples(parts: Sequence[Samples], pad_token: int) -> Samples:
    """Several batches of equally long responses as one, with prompts padded to the longest.

    1. Pad tokens and prompt masks on the left.
    2. Widen each support to the widest, with nothing kept in what is added.
    3. Put everything one below the other.
    """
    width = max(part.prefix_len for part in parts)
    short = [width - part.prefix_len for part in parts]
    tokens = [pad(p.tokens, (n, 0), value=pad_token) for p, n in zip(parts, short, strict=True)]
    masks = [pad(p.prompt_mask, (n, 0), value=False) for p, n in zip(parts, short, strict=True)]
    noted = all(part.residuals is not None for part in parts)
    return Samples(
        tokens=torch.cat(tokens),
        prompt_mask=torch.cat(masks),
        mask=torch.cat([part.mask for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        values=torch.cat([part.values for part in parts]),
        support=_join_supports([part.support for part in parts]),
        residuals=torch.cat([part.residuals for part in parts]) if noted else None,
    )


def _join_supports(parts: Sequence[Support | None]) -> Support | None:
    """Supports one below the other, as wide as the widest."""
    if parts[0] is None:
        return None
    width = max(part.tokens.shape[-1] for part in parts)
    added = [(0, width - part.tokens.shape[-1]) for part in parts]
    tokens = [pad(part.tokens, n) for part, n in zip(parts, added, strict=True)]
    kept = [pad(part.kept, n, value=False) for part, n in zip(parts, added, strict=True)]
    return Support(torch.cat(tokens), torch.cat(kept))
